# SPDX-License-Identifier: Apache-2.0
"""`echelon schedule`: draw a schedule, or check one that somebody wrote.

command.py          schedule show, schedule check
arguments.py        which schedule is asked for: by name, from a search, from a file
suggestions.py      how large it may be, and flags that work
"""
