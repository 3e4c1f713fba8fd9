# SPDX-License-Identifier: Apache-2.0
"""Why a plan is the best of an answer, why its neighbours are not, and what would change that.

why.py              what binds the best plan, and what its step waits for
neighbours.py       what speaks against one change; plan_changes.py: the changes
sensitivity.py      which plan another cluster or batch would have (what_if.py: those asked)
distant_plans.py    plans far from the best that may win there
repeat_search.py    a search again, quickly, timed as the answer's plans were
fixes.py            the cheapest changes with which a plan fits
no_plan.py          why a search found nothing; what_fits.py: the changes with which it does
bands.py            seconds and bytes with what is not known of them, and what that rests on
compare.py          two plans side by side
"""
