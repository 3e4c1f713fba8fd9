# SPDX-License-Identifier: Apache-2.0
"""`echelon plan`: the page of one run, or a search with its answer.

command.py          the flags; which of the two is asked for
report.py           the page of a run, as text and as JSON; its parts are
memory.py           what rests where, what a step adds, ZeRO's choices
experts.py          where experts are, how tokens travel
pipeline.py         stages and schedule in time
view.py             pictures, in the terminal or as SVG
search.py           run a search, print its answer (`planner/answer/`); write its best plan
search.schema.json  the JSON of an answer
why.py              why this plan, and what would change it, as text
"""
