# SPDX-License-Identifier: Apache-2.0
"""`echelon observe`: what a run did, and what it does.

command.py    the flags; the summary, the schedule planned and measured, as text and as JSON
experts.py    where the tokens of a step went
follow.py     how a run stands while it trains
"""
