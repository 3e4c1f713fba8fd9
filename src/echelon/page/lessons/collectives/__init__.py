# SPDX-License-Identifier: Apache-2.0
"""Lessons about what ranks send one another.

four.py             all-reduce, all-gather, reduce-scatter and all-to-all, round by round
all_reduce.py       one all-reduce by four algorithms
board.py            what ranks have after a round, as tiles, and its messages as arrows
recorded.py         the messages that ranks recorded, and what each had after each round
"""
