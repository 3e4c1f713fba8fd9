"""Why a plan is the best of an answer, why its neighbours are not, and what would change that.

`why.py` names what binds it and what its step waits for, `neighbours.py` what one change would
cost, `sensitivity.py` which plan another cluster or batch would have, `fixes.py` what makes a plan
fit that does not. Every second and byte has its band (`bands.py`).
"""
