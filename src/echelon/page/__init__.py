# SPDX-License-Identifier: Apache-2.0
"""One HTML file that opens without a network: figures of a plan, a rehearsal, a proof and a run.

What is drawn are the numbers of the planner, of the rehearsal and of the run's own files; the page
computes none. Its code is TypeScript (`web/`), built into `page.html`, which is in the package.

document.py    what a page says, draws and lists, in order
figures.py     what each kind of figure is: plain values, and the words to say them with
plan.py        the page of a plan; mesh.py, schedule.py: its figures
run.py, proof.py, rehearsal.py, search.py, comparison.py    the pages of these
explorer/      the page with controls, and its formulas
lessons/       figures that explain, walked through step by step, in the same page
html.py        a document written into the page
schema.py      the JSON Schema of a document, which the types of the TypeScript come from
"""
