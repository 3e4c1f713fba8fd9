# SPDX-License-Identifier: Apache-2.0
"""Products of the rows of all experts with the matrix of each, in one launch (CUTLASS, on a GPU).

What `feed_forward.py` does one expert after the other, where that is too little work at a time.
The kernel wants bfloat16 and rows of a multiple of 16 bytes; the matrices of the experts may lie
anywhere, as long as they are equally far apart. It reads on the device where the rows of each
expert end, so the host need not know. Of rows that lie side by side, as all do here, an expert may
have any number, none included, and what lies beyond the last end is left out: its result is no
number that anybody may read (`prepare_grouped_gemm_data` in PyTorch's `native/cuda`, whose checks
of alignment are of dims that grow along a row).

Shape suffixes: R rows (those of an expert side by side), E experts, I inputs, O outputs, F inner
width, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from echelon.models.batch import start_copy
from echelon.models.moe import Expert
from echelon.parallel.expert.inner_activation import InnerActivation
from echelon.parallel.kernels.expert_kernels import add_grouped_gradient, adds_grouped_gradients
from echelon.parallel.storage.gradients import GradientStore
from echelon.parallel.tensor import TensorSplit

RowCounts = Sequence[int] | torch.Tensor
"""How many rows each expert has; a tensor says where those of each end, which only the device knows
(int32)."""

_GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)
"""A build of PyTorch without it computes one expert after the other."""

_ALIGNED_BYTES = 16
_GENERATIONS = (9, 10)
"""Hopper and the Blackwell of servers. On others PyTorch computes one expert after the other, and
the host waits for the ends of the rows (`_grouped_mm_cuda` in `native/cuda`)."""


def has_grouped_kernel(x: torch.Tensor) -> bool:
    """Return whether grouped products of tensors like x are one launch, and the faster way."""
    if _GROUPED_MM is None or x.dtype != torch.bfloat16:
        return False
    if x.is_meta:
        return True  # what a rehearsal asks for
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] in _GENERATIONS


def stacked_view(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices of one memory as [E, O, I]; None where they are not equally far apart."""
    if not matrices:
        return None
    first = matrices[0]
    places = [one.storage_offset() for one in matrices]
    gaps = {after - before for before, after in pairwise(places)} or {first.numel()}
    memories = {one.untyped_storage().data_ptr() for one in matrices}
    aligned = all(
        count * first.element_size() % _ALIGNED_BYTES == 0
        for count in (*gaps, *first.shape, places[0])
    )
    if len(gaps) > 1 or len(memories) > 1 or min(gaps) < first.numel() or not aligned:
        return None
    return first.as_strided((len(matrices), *first.shape), (*gaps, first.shape[1], 1), places[0])


def row_ends(counts: RowCounts, device: torch.device) -> torch.Tensor:
    """Return where the rows of each expert end, int32; no host waits for it."""
    if isinstance(counts, torch.Tensor):
        return counts
    return start_copy(torch.tensor(counts).cumsum(0, dtype=torch.int32), device)


def ends_of(sorted_S: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return where the rows of each expert end, of the experts of rows in their order."""
    every_E = torch.arange(num_experts, device=sorted_S.device)
    return torch.searchsorted(sorted_S, every_E, right=True, out_int32=True)


def grouped_matmul(
    x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """Return the rows of each expert times its matrix transposed, [R, O]."""
    return _GROUPED_MM(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)


def _stacked_weights(
    experts: Sequence[Expert], store: GradientStore
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return gate and up side by side, and down, of all experts; None where they are no stack.

    The kernel adds no biases: experts with some compute one after the other.
    """
    if experts and experts[0].kind.bias:
        return None
    pairs = [store.matrices([one.gate.weight, one.up.weight]) for one in experts]
    gate_up = stacked_view([one for one in pairs if one is not None])
    down = stacked_view([one.down.weight.detach() for one in experts])
    if gate_up is None or down is None or len(gate_up) != len(experts):
        return None
    return gate_up, down


def needs_no_counts(x_RD: torch.Tensor, experts: Sequence[Expert], store: GradientStore) -> bool:
    """Return whether the host need not know how many of the rows x each expert gets."""
    if not len(x_RD) or not has_grouped_kernel(x_RD) or not adds_grouped_gradients(x_RD):
        return False
    return _stacked_weights(experts, store) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts:
    """The experts of a rank for one set of rows: `counts` of each, those of one side by side."""

    experts: Sequence[Expert]
    gate_up_EOI: torch.Tensor
    down_EOI: torch.Tensor
    counts: RowCounts
    ends_E: torch.Tensor
    activation: InnerActivation

    @classmethod
    def from_rows(
        cls,
        x_RD: torch.Tensor,
        experts: Sequence[Expert],
        counts: RowCounts,
        split: TensorSplit,
    ) -> GroupedExperts | None:
        """Return them where there is a kernel, rows to compute, and stacks of matrices."""
        if not len(x_RD) or not has_grouped_kernel(x_RD):
            return None
        stacks = _stacked_weights(experts, split.store)
        if stacks is None:
            return None
        return cls(
            experts=experts,
            gate_up_EOI=stacks[0],
            down_EOI=stacks[1],
            counts=counts,
            ends_E=row_ends(counts, x_RD.device),
            activation=InnerActivation.of(experts[0].kind, split),
        )

    def forward(
        self, x_RD: torch.Tensor, gates_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y_RD, and what backward needs of the inner activations."""
        gate_up = grouped_matmul(x_RD, self.gate_up_EOI, self.ends_E)
        inner = self.activation.forward(gate_up, gates_R)
        return grouped_matmul(inner, self.down_EOI, self.ends_E), gate_up

    def backward(
        self,
        dy_RD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        store: GradientStore,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of rows and gates; those of the weights are put off."""
        x_RD, gates_R, gate_up = saved
        dgates_R = torch.empty_like(gates_R)
        dinner = grouped_matmul(dy_RD, self.down_EOI.transpose(1, 2), self.ends_E)
        inner, dgate_up = self.activation.backward(dinner, gate_up, gates_R, dgates_R)
        dx_RD = grouped_matmul(dgate_up, self.gate_up_EOI.transpose(1, 2), self.ends_E)
        store.defer(lambda: self._add_weights(store, (dy_RD, inner), (dgate_up, x_RD)))
        return dx_RD, dgates_R

    def _add_weights(
        self,
        store: GradientStore,
        down: tuple[torch.Tensor, torch.Tensor],
        gate_up: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        if not isinstance(self.counts, torch.Tensor):
            self._add_weights_one_by_one(store, self.counts, down, gate_up)
            return
        for groups, (dy, x) in (
            ([[one.down.weight] for one in self.experts], down),
            ([[one.gate.weight, one.up.weight] for one in self.experts], gate_up),
        ):
            store.add_stack(groups, partial(_add_to_stack, dy, x, self.ends_E))

    def _add_weights_one_by_one(
        self,
        store: GradientStore,
        counts: Sequence[int],
        down: tuple[torch.Tensor, torch.Tensor],
        gate_up: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Add each expert's product where it adds up, which is faster where they are large."""
        parts = (one.split(list(counts)) for one in (*down, *gate_up))
        for expert, dy, inner, dgate_up, x in zip(self.experts, *parts, strict=True):
            store.add_matmul([expert.down.weight], dy, inner)
            store.add_matmul([expert.gate.weight, expert.up.weight], dgate_up, x)


def _add_to_stack(
    dy_RO: torch.Tensor,
    x_RI: torch.Tensor,
    ends_E: torch.Tensor,
    sums: Sequence[torch.Tensor],
    fresh: bool,
) -> None:
    """Add the gradient of each expert to its sum; they lie as far apart as the matrices do."""
    sum_EOI = stacked_view(sums)
    assert sum_EOI is not None, "gradients lie in their buckets as the values do"
    add_grouped_gradient(sum_EOI, dy_RO, x_RI, ends_E, fresh=fresh)
