# SPDX-License-Identifier: Apache-2.0
"""A small, strict compiler: formulas of `cost/`, rules and schedules as JavaScript for the page.

It reads the source of live functions, from a few entries on, with what they call, and writes one
module (`web/src/compiled/formulas.js`). What it does not know it refuses with file and line, so
that nothing is compiled silently wrong. In the page every quantity is one number: what is only
there for arrays of plans is left out. A member of an enumeration is its value, a set or a dict
finds tuples and records by what is in them, a generator that is no function of its own is an array.

Files import only files above them in this list.

names.py        what is reached, its source and its name; live values as JavaScript
expressions.py  expressions
calls.py        calls: of Python, of NumPy, of what is compiled; their names in the page
module.py       statements, functions, classes; the whole module
"""
