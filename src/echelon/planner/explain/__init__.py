# SPDX-License-Identifier: Apache-2.0
"""Why a plan is the best of an answer, why its neighbours are not, and what would change that.

repeat_search.py    a search again, quickly, timed as the answer's plans were
neighbours.py       one change of a plan, and what speaks against it
sensitivity.py      which plan another cluster or batch would have
why.py              what binds the best plan, and what its step waits for
fixes.py            the cheapest changes with which a plan fits
no_plan.py          why a search found nothing, and the changes with which it does
compare.py          two plans side by side
"""
