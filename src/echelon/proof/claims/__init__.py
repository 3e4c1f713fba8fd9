# SPDX-License-Identifier: Apache-2.0
"""What must hold of a plan, and how far off it may be.

claims.py           all claims in the order in which one causes the next
checks.py           comparisons of weights, samples, tokens, losses
activation_checks.py what passes between the parts of the model
value_checks.py     comparisons of gradients, updates and values; the replayed optimizer
routing_checks.py   comparisons of routes, loads and biases, with choice_errors.py
late_checks.py      races of a run with late completion, and its bits
conditioning.py     what a rounding is worth to a model that enlarges it
systematic.py       factors and sums that low precision hides, with factor_fit.py
predictions.py      bytes sent and held, the order of actions
tolerance.py        how far a correct plan may be from the oracle
numeric_range.py    weights much larger and smaller, where a narrow dtype ends
"""
