# SPDX-License-Identifier: Apache-2.0
"""The documents of pages: of a plan, a search, a run, a proof, a rehearsal, and of two plans.

Each is sections of plain values (`planner/view/document.py`); files import only files above them.

plan.py        a plan: sections of its report, and its pipeline in time
search.py      the answer of a search, above the page of its plan
proof.py       a proof           rehearsal.py   a rehearsal
curves.py      steps of a run as lines
run.py         the folder of a run, with its proof and rehearsal
comparison.py  two plans, or two runs
"""
