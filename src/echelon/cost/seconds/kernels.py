# SPDX-License-Identifier: Apache-2.0
"""Seconds of one kernel of known sizes, and what binds it: the roofline of counted work.

A kernel takes as long as its FLOPs at the rate that its shape reaches, or as its bytes at the rate
of the memory, whichever is longer (Williams et al., "Roofline", 2009). The rates are those of the
formulas of a block: `matmul.py` of products and of attention, the reached part of the bandwidth of
what only moves bytes, and that of updates for the optimizer.
"""

from __future__ import annotations

from typing import Literal

from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import MachineNumbers, first_number
from echelon.cost.seconds.matmul import attention_rates, matmul_seconds, memory_seconds

Binds = Literal["matmul", "attention", "memory"]
"""What a kernel spends its seconds on."""

ProductSizes = tuple[int, int, int, int, int]
"""Rows, depth, columns, bytes of an element, and how many such products there are."""


def product_seconds(machine: MachineNumbers, sizes: ProductSizes) -> float:
    """Return the seconds of products at the rate that their shape reaches."""
    rows, depth, columns, element, times = sizes
    return times * first_number(matmul_seconds(machine, rows, depth, columns, float(element)))


def kernel_seconds(
    work: CostInputs,
    num_bytes: float,
    *,
    product: ProductSizes | None = None,
    attention: tuple[float, float, bool] | None = None,
    update: bool = False,
) -> tuple[float, Binds]:
    """Return the seconds of a kernel, and what binds it.

    Of `attention` are given the FLOPs that are done, the keys that a query meets, and whether it is
    the backward pass; an `update` is the optimizer's.
    """
    machine = work.machine
    moving = first_number(memory_seconds(machine, num_bytes))
    if update:
        return moving * first_number(machine.memory) / first_number(machine.optimizer), "memory"
    if product is not None:
        computing = product_seconds(machine, product)
        # Both take the larger of arithmetic and of the bytes of their own sizes.
        rows, depth, columns, element, times = product
        least = element * times * (rows * depth + depth * columns + rows * columns)
        bound = computing <= first_number(memory_seconds(machine, max(num_bytes, least)))
        return max(computing, moving), "memory" if bound else "matmul"
    if attention is not None:
        flops, keys, backward = attention
        rates = attention_rates(machine, work.software.fused_share, keys)
        computing = flops / first_number(rates[backward])
        return max(computing, moving), "attention" if computing > moving else "memory"
    return moving, "memory"
