"""What a row of a table of published runs says.

`rows.py` reads a file, `cells.py` a cell; `models.py`, `machines.py`, `plans.py` and `programs.py`
turn a row into what the formulas read, `measured.py` into what was measured.
"""
