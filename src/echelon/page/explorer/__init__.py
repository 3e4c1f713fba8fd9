"""The explorer: a page whose numbers follow its controls, by the formulas of a search.

inputs.py     the controls as the numbers that formulas read: compiled for the page
tables.py     what controls can choose among: models, clusters, kinds, as numbers
document.py   what the page is given, and the page itself
program.py    what is compiled, from which entries
"""
