# SPDX-License-Identifier: Apache-2.0
"""Python of the page's build: what the explorer computes, compiled to JavaScript; types of records.

None of it is in the installed package. ``make web`` runs it; tests compare its outputs with the
files below `web/src/` that it wrote.

compiler/      formulas and rules in Python as JavaScript
inputs.py      controls as the numbers that formulas read, and what these come to
mesh.py        groups and links of the controls' mesh
guides.py      what the guides' trees and sizes say to the controls
schedules.py   schedules that are built in the page
program.py     what is compiled, from which entries: web/src/compiled/formulas.js
schema.py      the JSON Schema of a document, which the types of the TypeScript come from
"""
