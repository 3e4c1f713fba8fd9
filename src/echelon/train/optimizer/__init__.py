"""Optimizers on slices: AdamW, SGD and Muon, each equal to that of one device; the gradient norm.

`step.py` is the update of a rank, `elements.py` and `muon.py` that of one bucket, `jobs.py` their
order; state rests wherever `parallel/offload` keeps it.
"""

from echelon.train.optimizer.norm import local_norm_squared
from echelon.train.optimizer.step import MASTER, SliceOptimizer

__all__ = ["MASTER", "SliceOptimizer", "local_norm_squared"]
