"""Predict published runs, and say how near the predictions are.

`published/` reads a row of a file and says what it assumed; `predict.py` asks the formulas;
`errors.py` compares both, `left_out.py` with whole sources left out. `fit.py` fits the constants,
`residuals.py` and `spreads.py` say how far they are from runs that no fit saw; these and
`written.py` write into the package.
"""
