# SPDX-License-Identifier: Apache-2.0
"""Async tensor parallelism: products in chunks, each beside the message that brings the next one.

Split: as `tensor.py` splits, under sequence parallelism; the gathered input of a product and the
       sum of its outputs in one chunk of rows per tensor rank.
Sent:  gather-matmul: each of tp - 1 steps sends on the chunk that is here, and gets the next, while
       it is multiplied. matmul-scatter: each step adds its part to the sum of a chunk that came,
       and sends it on while the next part is multiplied. Around a ring, to the next rank only.
Bytes: `tensor_bytes` in `cost/bytes/sent.py`: tp - 1 messages of a chunk, as a gather has.
Must divide: tp | sequence_length, as sequence parallelism asks.
Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
       Deep Learning Models", ASPLOS 2023.

A sum is made in the order of the ring (`docs/decisions/040-async-tensor-parallel.md`): the rank
after its owner begins, the owner adds its part last. It is rounded to the dtype of the stream at
each rank, as in a ring of NCCL.

Shape suffixes: N rows of all tensor ranks, n = N / tp rows of one, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from echelon.core.event import MULTIPLY
from echelon.core.plan import TensorOverlapKind
from echelon.parallel.transport.collectives import Group, Pending
from echelon.parallel.transport.rows import gather_rows, scatter_sum

Gathered: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
"""A product [N, O], and the rows [N, I] that it is of, where they are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProduct:
    """A product with a weight, for any rows of its input."""

    multiply: Callable[[torch.Tensor, torch.Tensor], object]
    """Write the product of rows [m, I] into [m, O]."""
    width: int
    """O: the width of the output."""
    weight_IO: torch.Tensor | None
    """The weight as one matrix; None where its parts do not lie side by side."""


class TensorOverlap(Protocol):
    """A way for products to run beside the messages of the same rows."""

    def gather_product(
        self,
        x_nI: torch.Tensor,
        product: RowProduct,
        group: Group,
        *,
        name: str,
        keeps: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Gathered:
        """Return the product of the rows of all ranks, and with `keeps` these rows.

        `meanwhile` is run as soon as something is under way.
        """
        ...

    def product_scatter(
        self, x_NI: torch.Tensor, product: RowProduct, group: Group, *, name: str
    ) -> torch.Tensor:
        """Return this rank's rows [n, O] of the sum of all ranks' products."""
        ...


class RingOverlap:
    """Chunks that go around the ring of tensor ranks."""

    def gather_product(
        self,
        x_nI: torch.Tensor,
        product: RowProduct,
        group: Group,
        *,
        name: str,
        keeps: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Gathered:
        """Multiply the chunk that is here while it goes on and the next one comes."""
        n = x_nI.shape[0]
        y_NO = x_nI.new_empty((n * group.size, product.width))
        whole_NI = x_nI.new_empty((n * group.size, x_nI.shape[1])) if keeps else None
        chunks = _passing_chunks(x_nI.contiguous(), group, name, whole_NI)
        for step, (owner, chunk_nI) in enumerate(chunks):
            if step == 0 and meanwhile is not None:
                meanwhile()
            with record_product(group, f"{name}.{step}"):
                product.multiply(chunk_nI, _rows_of(owner, y_NO, group))
        return y_NO, whole_NI

    def product_scatter(
        self, x_NI: torch.Tensor, product: RowProduct, group: Group, *, name: str
    ) -> torch.Tensor:
        """Multiply a chunk while the sum that it is a part of comes; add it, and send it on."""
        shape = x_NI.shape[0] // group.size, product.width
        came_nO, pending = x_NI.new_empty(shape), Pending()
        for step in range(group.size):
            # After this step the sum has group.size - 1 - step hops to go to its owner.
            owner = (group.index - 1 - step) % group.size
            part_nO = x_NI.new_empty(shape)
            with record_product(group, f"{name}.{step}"):
                product.multiply(_rows_of(owner, x_NI, group), part_nO)
            pending.wait()
            if step:
                part_nO.add_(came_nO)
            if step == group.size - 1:
                return part_nO
            pending = _pass_on(part_nO, came_nO, group, f"{name}.{step + 1}")
        raise AssertionError("a group has a member")


def _passing_chunks(
    own_nI: torch.Tensor, group: Group, name: str, whole_NI: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of every rank and whose they are, each while it goes on and the next comes.

    They are gathered into `whole_NI`, or pass through two chunks of memory in turn.
    """
    buffers: list[torch.Tensor] = []
    if whole_NI is not None:
        _rows_of(group.index, whole_NI, group).copy_(own_nI)
    chunk_nI = own_nI
    for step in range(group.size):
        owner, next_owner = ((group.index - step - k) % group.size for k in (0, 1))
        next_nI, pending = chunk_nI, Pending()
        if step + 1 < group.size:
            if whole_NI is not None:
                next_nI = _rows_of(next_owner, whole_NI, group)
            elif len(buffers) < 2:
                next_nI = torch.empty_like(own_nI)
                buffers.append(next_nI)
            else:
                next_nI = buffers[step % 2]
            pending = _pass_on(chunk_nI, next_nI, group, f"{name}.{step + 1}")
        yield owner, chunk_nI
        pending.wait()
        chunk_nI = next_nI


def _rows_of(owner: int, rows_ND: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the rows of a member of the group."""
    n = rows_ND.shape[0] // group.size
    return rows_ND[owner * n : (owner + 1) * n]


def _pass_on(sent: torch.Tensor, received: torch.Tensor, group: Group, name: str) -> Pending:
    """Start to send to the next rank of the ring, and to receive from the one before."""
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    return group.exchange({after: sent}, {before: received}, name=name)


def record_product(group: Group, name: str) -> AbstractContextManager[None]:
    """Record what happens inside as the product of one chunk: what a message hides behind."""
    return group.recorder.span(MULTIPLY, name)


class SymmetricMemoryOverlap:
    """Fused operators of PyTorch that read the memory of the other GPUs while they multiply."""

    def gather_product(
        self,
        x_nI: torch.Tensor,
        product: RowProduct,
        group: Group,
        *,
        name: str,
        keeps: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> Gathered:
        """Multiply the rows of each rank as soon as they have been read."""
        if product.weight_IO is None:
            whole_NI, pending = gather_rows(x_nI, group, name=name)
            if meanwhile is not None:
                meanwhile()
            pending.wait()
            y_NO = x_nI.new_empty((whole_NI.shape[0], product.width))
            product.multiply(whole_NI, y_NO)
            return y_NO, whole_NI if keeps else None
        if meanwhile is not None:
            meanwhile()
        return group.all_gather_product(
            x_nI.contiguous(), product.weight_IO, name=name, keeps=keeps
        )

    def product_scatter(
        self, x_NI: torch.Tensor, product: RowProduct, group: Group, *, name: str
    ) -> torch.Tensor:
        """Multiply the rows of each rank, which it reads when they are there, and add them up."""
        if product.weight_IO is None:
            y_NO = x_NI.new_empty((x_NI.shape[0], product.width))
            product.multiply(x_NI, y_NO)
            y_nO, pending = scatter_sum(y_NO, group, name=name)
            pending.wait()
            return y_nO
        return group.product_reduce_scatter(x_NI.contiguous(), product.weight_IO, name=name)


def tensor_overlap(kind: TensorOverlapKind) -> TensorOverlap | None:
    """Return what a plan chose; None where products and messages take turns."""
    if kind == "none":
        return None
    return RingOverlap() if kind == "ring" else SymmetricMemoryOverlap()
