# SPDX-License-Identifier: Apache-2.0
"""Attention over context ranks: what it sends, and what it holds.

sent      bytes on the ring, of gathers, and of heads against positions
memory    what waits for backward, and the most that is there while it runs
"""
