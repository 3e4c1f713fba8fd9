# SPDX-License-Identifier: Apache-2.0
"""The two sides of a proof, of any program: one device, and its ranks.

mesh.py         axes by the user's names, and groups of ranks of a plan that share something
run.py          a step on one device, and what all ranks had, put together
captured.py     what hooks captured of a program that is not ours
fits.py         a tensor fitted as a factor x another, or as a sum of several
evidence.py     both sides, and how far apart they may be

Our engine fills the same record, and adds what its plan promises: `claims/plan_evidence.py`.
"""
