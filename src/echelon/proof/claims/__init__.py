# SPDX-License-Identifier: Apache-2.0
"""What must hold of a program beside one device, and how far off it may be.

plan_evidence.py    the evidence of a plan: what any program has, and what the plan promises
tolerance.py        how far a correct plan may be from the oracle
checks.py           comparisons of weights, samples, tokens, losses, and what passes in the model
value_checks.py     comparisons of gradients, updates and values; the replayed optimizer
taken.py            gradients of a program whose optimizer reduces them, judged by their updates
captured_checks.py  comparisons of what hooks captured of a program that is not ours
routing_checks.py   comparisons of routes, loads and biases, with choice_errors.py
late_checks.py      races of a run with late completion, and its bits
islands.py          the evidence of each island of local SGD, and what they make of meetings
predictions.py      bytes sent and held, the order of actions
systematic.py       factors and sums that low precision hides
claims.py           all claims in the order in which one causes the next, and the judge
conditioning.py     what rounding decides in float64: enlarged errors, ties of 8-bit numbers
numeric_range.py    weights much larger and smaller, where a narrow dtype ends
"""
