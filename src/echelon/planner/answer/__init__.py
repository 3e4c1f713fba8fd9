# SPDX-License-Identifier: Apache-2.0
"""What a search found, and the views of it that a command prints and Python returns.

Files import only files above them in this list.

    legend.py          words, signs and numbers of a plan in tables
    objectives.py      a step of a long run, and the longest sequence: facts, arithmetic, JSON
    recommend_text.py  the page: the plan to run, why, what else there is, what next
    search_text.py     the plans of a search as a table and as text
    search_json.py     the plans, which one to run, and why, as JSON
    why_text.py        why this plan, what would change it, and a search in which nothing fits
    answer.py          what `ec.plan` returns: plans with their numbers; four without a cluster
"""
