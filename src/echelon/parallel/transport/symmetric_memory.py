# SPDX-License-Identifier: Apache-2.0
"""PyTorch's fused products over symmetric memory: memory of one GPU that others read by address.

`symm_mem::fused_all_gather_matmul` and `symm_mem::fused_matmul_reduce_scatter` copy the rows of
another rank over NVLink on a stream beside the one that multiplies those of the rank before; the
second adds up all parts at once at the end. Importing the module registers them; their kernels are
those of CUDA. What they send is what a gather or a reduce-scatter sends.

Shape suffixes: N rows of all ranks, n = N / ranks rows of one, I inputs, O outputs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist

from echelon.core.errors import EnvironmentProblem
from echelon.core.rulebook.launch import SYMMETRIC_MEMORY

_MODULE = "torch.distributed._symmetric_memory"
OPERATORS = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")


def missing_of_symmetric_memory(device: torch.device) -> str:
    """Return what a device or this torch lacks for the fused products; "" where nothing is."""
    try:
        import_module(_MODULE)
    except ImportError as error:
        return f"torch {torch.__version__} cannot import {_MODULE}: {error}"
    lacking = [name for name in OPERATORS if not hasattr(torch.ops.symm_mem, name)]
    if lacking:
        return f"torch {torch.__version__} has no symm_mem::{lacking[0]}"
    if device.type != "cuda":
        return f"they run on GPUs, and this rank computes on {device.type}"
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    if others and not any(torch.cuda.can_device_access_peer(own, other) for other in others):
        return f"GPU {own} can read the memory of no other GPU that it sees"
    return ""


def require_symmetric_memory(device: torch.device) -> None:
    """Raise EnvironmentProblem unless the fused products can run on a device."""
    missing = missing_of_symmetric_memory(device)
    if missing:
        raise EnvironmentProblem(
            SYMMETRIC_MEMORY.problem(
                f'mesh.tp_overlap = "symmetric-memory" needs fused products, but {missing}',
                key="mesh.tp_overlap",
                suggestions=('mesh.tp_overlap = "ring"',),
            )
        )


def fused_all_gather_product(
    x_nI: torch.Tensor, weight_IO: torch.Tensor, group: dist.ProcessGroup, *, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the product [N, O] of the rows of all members, and with `keeps` these rows."""
    whole, products = _operator(OPERATORS[0])(
        x_nI, [weight_IO], 0, group.group_name, return_A=keeps
    )
    return cast(torch.Tensor, products[0]), cast("torch.Tensor | None", whole) if keeps else None


def fused_product_reduce_scatter(
    x_NI: torch.Tensor, weight_IO: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return this member's rows [n, O] of the sum of all members' products."""
    return cast(torch.Tensor, _operator(OPERATORS[1])(x_NI, weight_IO, "sum", 0, group.group_name))


def _operator(name: str) -> Any:
    return getattr(torch.ops.symm_mem, name)
