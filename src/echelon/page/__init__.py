# SPDX-License-Identifier: Apache-2.0
"""One HTML file that opens without a network: figures of a plan, a rehearsal, a proof and a run.

What is drawn are the numbers of the planner, of the rehearsal and of the run's own files; the page
computes none but in the explorer. Its code is TypeScript and compiled Python (`web/`), built into
`page.html`, which is in the package. A document (`planner/view/document.py`) is what it draws.

Rooms import only rooms above them in this list; an import contract holds it.

drawn/         figures as SVG and PNG; a document as HTML without a script
documents/     the documents of a plan, a search, a run, a proof, a rehearsal, two plans
lessons/       figures that explain, walked through step by step, in the same page
explorer/      the page with controls, and its formulas
html.py        a document written into the page
notebook.py    documents as a notebook shows them
serve.py       the page of a run while it trains
"""
