# SPDX-License-Identifier: Apache-2.0
"""What a search found, and the views of it that a command prints and Python returns.

estimate.py        a step, memory and rates with their bands: also of a run
search_text.py     the plans of a search as text; legend.py: its signs, and what they mean
search_json.py     the plans, which one to run, and why, as JSON
recommend_text.py  the page: the plan to run, why, what else there is, what next
no_plan_view.py    a search in which nothing fits; longest_text.py: the longest sequence
expected_text.py   a step of a long run: its line, its arithmetic and its JSON
answer.py          what `ec.plan` returns; estimated.py: one plan of it, with its numbers
html.py            the answer in a notebook; rows.py: its plans as rows of a table
"""
