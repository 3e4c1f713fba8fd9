"""Predict published runs, and say how near the predictions are.

`rows.py` reads a file, `cells.py` a cell; `models.py`, `machines.py`, `plans.py` and `programs.py`
turn a row into what the formulas read, and say what they assumed; `predict.py` asks the formulas,
`measured.py` the row; `errors.py` compares the two, `left_out.py` with whole sources left out.
"""
