# SPDX-License-Identifier: Apache-2.0
"""LoRA on ranks: adapters beside frozen linear layers, y += s (x A^T) B^T, gradients by hand.

Split: as their layer is: of a column-parallel one B by rows, of a row-parallel one A by columns;
       the other matrix is whole on every tensor rank, which has a part of its gradient.
Sent:  nothing of its own in a pass: what an adapter adds is part of the layer's output and of its
       input's gradient before these are summed. The gradients of the whole matrices are summed over
       tensor ranks once per step.
Bytes: `partial_bytes` in `cost/bytes/data.py`.
Must divide: what must for the layers.
Source: Hu et al., "LoRA", 2021, section 4.1.

Neither the narrow product x A^T nor its gradient waits for anything: both are made again where
weight gradients are, from the input and the output gradient that the layer keeps for that.
Shape suffixes: N tokens, I inputs and O outputs of a layer on this rank, R ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from echelon.core.choices.lora import Lora
from echelon.models.modules import EmptyLinear
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.storage.matmul import matmul


def takes_gradients(linears: Sequence[nn.Linear], store: GradientStore) -> bool:
    """Return whether layers that read the same input have anything to learn from it."""
    return bool(_adapted(linears)) or any(store.trains(one.weight) for one in linears)


def add_adapters(
    y_NO: torch.Tensor, x_NI: torch.Tensor, linears: Sequence[nn.Linear], store: GradientStore
) -> None:
    """Add what adapters make of x to the outputs of their layers, side by side in y."""
    adapted = _adapted(linears)
    if not adapted:
        return
    narrow_NR = _narrow(x_NI, adapted, store)
    for (columns, linear, lora), part_Nr in _with_parts(adapted, narrow_NR):
        y_NO[:, columns].addmm_(part_Nr, linear.lora_b.weight.t(), alpha=lora.scale)


def add_input_gradients(
    dx_NI: torch.Tensor, dy_NO: torch.Tensor, linears: Sequence[nn.Linear], store: GradientStore
) -> None:
    """Add what comes through adapters to the gradient of x."""
    adapted = _adapted(linears)
    if not adapted:
        return
    gradient_NR = _narrow_gradient(dy_NO, adapted)
    weight_RI = store.matrices([linear.lora_a.weight for _, linear, _ in adapted])
    if weight_RI is not None:
        dx_NI.addmm_(gradient_NR, weight_RI)
        return
    for (_, linear, _), part_Nr in _with_parts(adapted, gradient_NR):
        dx_NI.addmm_(part_Nr, linear.lora_a.weight)


def add_adapter_gradients(
    dy_NO: torch.Tensor, x_NI: torch.Tensor, linears: Sequence[nn.Linear], store: GradientStore
) -> None:
    """Give the gradients of A and B to the store."""
    adapted = _adapted(linears)
    if not adapted:
        return
    gradient_NR = _narrow_gradient(dy_NO, adapted)
    store.add_matmul([linear.lora_a.weight for _, linear, _ in adapted], gradient_NR, x_NI)
    del gradient_NR
    narrow_NR = _narrow(x_NI, adapted, store)
    for (columns, linear, lora), part_Nr in _with_parts(adapted, narrow_NR):
        store.add_matmul([linear.lora_b.weight], dy_NO[:, columns], part_Nr.mul_(lora.scale))


_Adapted = Sequence[tuple[slice, EmptyLinear, Lora]]
"""Layers with an adapter, each with where its outputs are among those side by side."""


def _adapted(linears: Sequence[nn.Linear]) -> _Adapted:
    found: list[tuple[slice, EmptyLinear, Lora]] = []
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        if isinstance(linear, EmptyLinear) and linear.lora is not None:
            found.append((slice(start, stop), linear, linear.lora))
        start = stop
    return found


def _with_parts(
    adapted: _Adapted, narrow_NR: torch.Tensor
) -> Iterator[tuple[tuple[slice, EmptyLinear, Lora], torch.Tensor]]:
    parts = narrow_NR.split([lora.rank for _, _, lora in adapted], dim=1)
    return zip(adapted, parts, strict=True)


def _narrow(x_NI: torch.Tensor, adapted: _Adapted, store: GradientStore) -> torch.Tensor:
    """Return x A^T of all adapters side by side, [N, R]."""
    weights: list[torch.Tensor] = [linear.lora_a.weight for _, linear, _ in adapted]
    weight_RI = store.matrices(weights)
    return matmul(x_NI, torch.cat(weights) if weight_RI is None else weight_RI)


def _narrow_gradient(dy_NO: torch.Tensor, adapted: _Adapted) -> torch.Tensor:
    """Return s dy B of all adapters side by side, [N, R]: the gradient of x A^T."""
    rank = sum(lora.rank for _, _, lora in adapted)
    gradient_NR = dy_NO.new_empty((dy_NO.shape[0], rank))
    for (columns, linear, lora), part_Nr in _with_parts(adapted, gradient_NR):
        part_Nr.copy_(dy_NO[:, columns] @ linear.lora_b.weight).mul_(lora.scale)
    return gradient_NR
