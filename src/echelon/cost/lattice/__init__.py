"""Bytes and seconds of many plans at once, in NumPy.

Every quantity here is a number or an array; arrays of one call have one shape, so a formula serves
one plan, a lattice of 100,000 plans of one model, and a table of runs of different models alike.
`numbers.py` says what goes in; `step.py` (seconds) and `memory.py` (bytes) what comes out.
"""
