# SPDX-License-Identifier: Apache-2.0
"""Chats: records of messages, the templates that write them, tokens told whether they count."""
