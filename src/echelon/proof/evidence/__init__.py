# SPDX-License-Identifier: Apache-2.0
"""The two sides of a proof, of any program: one device, and its ranks.

mesh.py         axes by the user's names: ranks, coordinates, groups
groups.py       the groups of ranks of a plan that share something
steps.py        a training step on one device, what passes in it, and what its loss is of
run.py          what all ranks had, put together: parts of tensors, whole tensors, reports
captured.py     what hooks captured of a program that is not ours
fits.py         a tensor fitted as a factor x another, or as a sum of several
tolerance.py    how far off a correct run may be
evidence.py     both sides, and how far apart they may be

Our engine fills the same record, and adds what its plan promises: `claims/plan_evidence.py`.
"""
