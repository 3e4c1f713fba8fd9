# SPDX-License-Identifier: Apache-2.0
"""Parts of messages: loggers, counts in sentences, words of other tools, settings that are gone."""
