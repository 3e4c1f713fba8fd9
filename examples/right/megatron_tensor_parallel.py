"""Megatron-core tensor parallelism: two tensor ranks, its DDP and optimizer.

The model, its truth and its names are in megatron_llama.py.
"""

from megatron_llama import one_device, train

import echelon as ec

MESH = {"tp": 2}
FLOAT64 = False  # its optimizers keep fp32

__all__ = ["one_device"]


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train this rank."""
    return train(case)
