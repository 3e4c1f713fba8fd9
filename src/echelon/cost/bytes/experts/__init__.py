# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens on their way to experts.

dispatch   which terms each way of dispatch has
sent       bytes that they send
memory     bytes that rows hold on their way, and inside of experts
"""
