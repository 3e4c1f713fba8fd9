# SPDX-License-Identifier: Apache-2.0
"""The explorer: a page whose numbers follow its controls, by the formulas of a search.

What only the page runs, compiled, is in `web/formulas/`.

controls.py      what the controls say, names of settings that go together, their run file
broken_rules.py  which rules the controls break
tables.py        what controls can choose among: models, clusters, kinds, as numbers
document.py      what the page is given, and the page itself
"""
