# SPDX-License-Identifier: Apache-2.0
"""Numbers that follow from settings."""
