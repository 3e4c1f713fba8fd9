# SPDX-License-Identifier: Apache-2.0
"""`echelon schedule`: draw a schedule, or check one that somebody wrote.

command.py          schedule show, schedule check
arguments.py        the schedule that is asked for (by name, from a search, a file); flags that work
"""
