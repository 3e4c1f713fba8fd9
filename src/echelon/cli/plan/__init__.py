# SPDX-License-Identifier: Apache-2.0
"""`echelon plan`: the report of one run, or a search with its answer.

command.py          the flags; which of the two is asked for
search.py           run a search, print its answer (`planner/answer/`); write its best plan
search.schema.json  the JSON of an answer
"""
