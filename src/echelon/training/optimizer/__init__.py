# SPDX-License-Identifier: Apache-2.0
"""Optimizers on slices: AdamW, SGD and Muon, each equal to that of one device; the gradient norm.

step.py             the update of a rank's slices, its order, its learning rate; the norm
trained_ranges.py   which elements are trained, in fused calls of a rule
elementwise.py      AdamW and SGD, which update each element by itself
muon.py             the update of whole matrices, and who sends which piece

State rests wherever `parallel/offload` keeps it.
"""

from echelon.training.optimizer.step import (
    MASTER,
    SliceOptimizer,
    local_norm_squared,
    sum_of_squares,
)

__all__ = ["MASTER", "SliceOptimizer", "local_norm_squared", "sum_of_squares"]
