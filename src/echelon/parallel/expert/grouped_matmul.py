"""Products of the rows of all experts with the matrix of each, in one launch (CUTLASS, on a GPU).

What `feed_forward.py` does one expert after the other, where that is too little work at a time.
The kernel wants bfloat16 and rows of a multiple of 16 bytes; the matrices of the experts may lie
anywhere, as long as they are equally far apart.

Shape suffixes: R rows (those of an expert side by side), E experts, I inputs, O outputs, F inner
width, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from echelon.core.plan import KernelProvider
from echelon.models.moe import Expert
from echelon.parallel.gradients import GradientStore
from echelon.parallel.kernels.fused import weighted_swiglu, weighted_swiglu_backward
from echelon.parallel.tensor import TensorSplit

_GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)
"""A build of PyTorch without it computes one expert after the other."""

_ALIGNED_BYTES = 16


def has_grouped_kernel(x: torch.Tensor) -> bool:
    """Return whether grouped products of tensors like x are one launch, and the faster way."""
    on_gpu = x.is_cuda or x.is_meta  # or is rehearsed
    return _GROUPED_MM is not None and on_gpu and x.dtype == torch.bfloat16


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


def row_ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return where the rows of each expert end."""
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def grouped_matmul(
    x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """Return the rows of each expert times its matrix transposed, [R, O]."""
    return _GROUPED_MM(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)


def weight_gradients(
    dy_RO: torch.Tensor, x_RI: torch.Tensor, ends_E: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Return dy^T x of the rows of each expert, [E, O, I]; zero where it has none."""
    made_EOI = _GROUPED_MM(dy_RO.t(), x_RI, offs=ends_E)
    for expert, count in enumerate(counts):
        if not count:
            made_EOI[expert].zero_()
    return made_EOI


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedExperts:
    """The experts of a rank for one set of rows: `counts` of each, those of one side by side."""

    experts: Sequence[Expert]
    gate_up_EOI: torch.Tensor
    down_EOI: torch.Tensor
    counts: Sequence[int]
    ends_E: torch.Tensor
    provider: KernelProvider

    @classmethod
    def from_rows(
        cls,
        x_RD: torch.Tensor,
        experts: Sequence[Expert],
        counts: Sequence[int],
        split: TensorSplit,
    ) -> GroupedExperts | None:
        """Return them where there is a kernel, rows to compute, and stacks of matrices."""
        if not len(x_RD) or not has_grouped_kernel(x_RD):
            return None
        pairs = [split.store.matrices([one.gate.weight, one.up.weight]) for one in experts]
        gate_up = stacked_view([one for one in pairs if one is not None])
        down = stacked_view([one.down.weight.detach() for one in experts])
        if gate_up is None or down is None or len(gate_up) != len(experts):
            return None
        return cls(
            experts=experts,
            gate_up_EOI=gate_up,
            down_EOI=down,
            counts=counts,
            ends_E=row_ends(counts, x_RD.device),
            provider=split.kernels.of("swiglu"),
        )

    def forward(
        self, x_RD: torch.Tensor, gates_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y_RD, and what backward needs of the inner activations."""
        gate_up = grouped_matmul(x_RD, self.gate_up_EOI, self.ends_E)
        inner = weighted_swiglu(gate_up, gates_R, provider=self.provider)
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
        inner, dgate_up = weighted_swiglu_backward(
            dinner, gate_up, gates_R, dgates_R, provider=self.provider
        )
        dx_RD = grouped_matmul(dgate_up, self.gate_up_EOI.transpose(1, 2), self.ends_E)
        store.defer(lambda: self._add_weights(store, (dy_RD, inner), (dgate_up, x_RD)))
        return dx_RD, dgates_R

    def _add_weights(
        self,
        store: GradientStore,
        down: tuple[torch.Tensor, torch.Tensor],
        gate_up: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        if store.widens(self.experts[0].down.weight, down[0].dtype):
            self._add_weights_one_by_one(store, down, gate_up)
            return
        down_EOI = weight_gradients(*down, self.ends_E, self.counts)
        gate_up_EOI = weight_gradients(*gate_up, self.ends_E, self.counts)
        for expert, d_down, d_gate_up in zip(self.experts, down_EOI, gate_up_EOI, strict=True):
            d_gate, d_up = d_gate_up.chunk(2)
            store.add(expert.down.weight, d_down)
            store.add(expert.gate.weight, d_gate)
            store.add(expert.up.weight, d_up)

    def _add_weights_one_by_one(
        self,
        store: GradientStore,
        down: tuple[torch.Tensor, torch.Tensor],
        gate_up: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Add each expert's product where it adds up: the grouped kernel gives bf16 alone."""
        parts = (one.split(list(self.counts)) for one in (*down, *gate_up))
        for expert, dy, inner, dgate_up, x in zip(self.experts, *parts, strict=True):
            store.add_matmul([expert.down.weight], dy, inner)
            store.add_matmul([expert.gate.weight, expert.up.weight], dgate_up, x)
