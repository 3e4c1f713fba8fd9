# SPDX-License-Identifier: Apache-2.0
"""A small, strict compiler: formulas of `cost/`, rules and schedules as JavaScript for the page.

It reads the source of live functions, from a few entries on, with what they call, and writes one
module (`web/src/compiled/formulas.js`). What it does not know it refuses with file and line, so
that nothing is compiled silently wrong. In the page every quantity is one number: what is only
there for arrays of plans is left out. A member of an enumeration is its value, a set or a dict
finds tuples and records by what is in them, a generator that is no function of its own is an array.

source.py       the syntax tree of a live function or class, and refusals
names.py        what is reached, and what it is called
constants.py    live values as JavaScript
expressions.py  expressions      statements.py  statements, functions, classes
calls.py        calls: of Python, of NumPy, of what is compiled
functions.py    functions and methods by their names in the page's runtime
module.py       the whole module: ``python -m echelon.page.compiled.module``
"""
