# SPDX-License-Identifier: Apache-2.0
"""The explorer: a page whose numbers follow its controls, by the formulas of a search.

controls.py   what the controls say, and names of settings that go together
inputs.py     the controls as the numbers that formulas read, and what these come to
rules/        which rules the controls break
run_file.py   the run file of the controls
mesh.py       groups and links of the controls' mesh
guides.py     what the guides' trees and sizes say to the controls
tables.py     what controls can choose among: models, clusters, kinds, as numbers
document.py   what the page is given, and the page itself
program.py    what is compiled, from which entries
"""
