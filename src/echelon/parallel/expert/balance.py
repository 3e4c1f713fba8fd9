# SPDX-License-Identifier: Apache-2.0
"""How loads are counted over all ranks, and what follows from them: losses, shares, biases.

Every rank notes how it routed its own tokens. One small all-reduce at the end of a step adds up the
notes of all ranks of a pipeline stage, so what follows (the shares of the next step's auxiliary
loss, the move of the biases) is computed by each rank alike, from whole numbers.

Bytes: `routing_bytes` in `cost/bytes/expert_sent.py`.
Source: Fedus et al., "Switch Transformers", 2021, section 2.2; Wang et al., "Auxiliary-Loss-Free
        Load Balancing Strategy for Mixture-of-Experts", 2024; Zoph et al., "ST-MoE", 2022.

Shape suffixes: E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.core.plan import Plan
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.device_mesh import RankGroups

SCALARS = 3
"""Numbers of a layer beside those of each expert: dropped assignments, and two losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """Say how one layer routed the tokens of a global batch; counts are of before any drops."""

    counts: tuple[int, ...]
    dropped: int
    aux_loss: float
    z_loss: float

    @property
    def imbalance(self) -> float:
        """Return the load of the busiest expert over the mean."""
        mean = sum(self.counts) / len(self.counts)
        return max(self.counts) / mean if mean else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStatistics:
    """What one rank notes of the tokens that it routed: counts and probabilities by expert."""

    counts_E: torch.Tensor
    probabilities_E: torch.Tensor
    dropped: torch.Tensor
    aux_loss: torch.Tensor
    z_loss: torch.Tensor

    def row(self) -> torch.Tensor:
        """Return all of it as float64, in which whole numbers are exact."""
        scalars = torch.stack([one.double() for one in (self.dropped, self.aux_loss, self.z_loss)])
        return torch.cat([self.counts_E.double(), self.probabilities_E.double(), scalars])


class Balancer:
    """Keep the biases and the last shares of the layers of one rank, and count the next ones."""

    def __init__(
        self, plan: Plan, groups: RankGroups, layers: Sequence[int], device: torch.device
    ) -> None:
        """Begin with biases of zero and the same share for each expert."""
        experts = plan.model.experts
        assert experts is not None, "a dense model has nothing to balance"
        has_bias = plan.mathematics.balance.has_bias
        assert experts.router_bias or not has_bias, "the model has no bias to balance by"
        self.plan, self.layers, self._groups = plan, tuple(layers), groups
        self.experts, self.balance = experts, plan.mathematics.balance
        dtype = TORCH_DTYPES[plan.mathematics.precision.parameters]
        self.dtype = torch.promote_types(dtype, torch.float32)
        size = experts.num_experts
        self.biases: dict[int, torch.Tensor] = {}
        if experts.router_bias:
            self.biases = {i: torch.zeros(size, dtype=self.dtype, device=device) for i in layers}
        self.shares = {
            i: torch.full((size,), 1.0 / size, dtype=self.dtype, device=device) for i in layers
        }
        self.loss_scale = 1.0
        self._device = device
        self._recorded: dict[tuple[int, int | None], RoutingStatistics] = {}
        self._loads: dict[int, LayerLoad] = {}

    @property
    def loss_factor(self) -> float:
        """Return what one token adds to an auxiliary loss: coefficient x E / tokens."""
        experts = self.experts.num_experts
        return self.balance.aux_coefficient * experts / self.plan.tokens_per_step

    @property
    def z_factor(self) -> float:
        """Return what one token adds to the z-loss."""
        return self.balance.z_coefficient / self.plan.tokens_per_step

    def start_step(self, loss_scale: float) -> None:
        """Forget the notes of the last step; losses are multiplied by `loss_scale` in backward."""
        self.loss_scale = loss_scale
        self._recorded.clear()

    def record(self, layer: int, noted: RoutingStatistics) -> None:
        """Keep how the microbatch at work was routed; who routes it again notes the same."""
        self._recorded[layer, self._groups.recorder.microbatch] = noted

    def recorded(self) -> list[RoutingStatistics]:
        """Return what this rank has noted in this step so far."""
        return list(self._recorded.values())

    def finish(self) -> Mapping[int, LayerLoad]:
        """Return the loads of the layers of this rank over the whole global batch."""
        if not self.layers:
            return {}
        size = self.experts.num_experts
        rows = torch.zeros(
            (len(self.layers), 2 * size + SCALARS), dtype=torch.float64, device=self._device
        )
        for (layer, _), noted in self._recorded.items():
            rows[self.layers.index(layer)] += noted.row()
        for group in (self._groups.stage, self._groups.mirror):
            group.all_reduce(rows, name="routing").wait()
        with self._groups.recorder.reading("the loads of experts"):
            rows = rows.cpu()
        self._loads = {layer: self._load(row) for layer, row in zip(self.layers, rows, strict=True)}
        return self._loads

    def _load(self, row: torch.Tensor) -> LayerLoad:
        size = self.experts.num_experts
        counts_E, probabilities_E = row[:size], row[size : 2 * size]
        dropped, aux_loss, z_loss = (float(one) for one in row[2 * size :])
        if self.balance.has_aux and self.balance.aux_over == "global":
            # The value is that of this step's own shares; its gradient was that of the last ones.
            shares_E = counts_E / counts_E.sum().clamp(min=1)
            aux_loss = self.loss_factor * float(shares_E @ probabilities_E)
        return LayerLoad(
            counts=tuple(int(one) for one in counts_E),
            dropped=int(dropped),
            aux_loss=aux_loss,
            z_loss=z_loss,
        )

    def update(self) -> None:
        """Move the biases against the loads of the last step, and take over its shares."""
        for layer, load in self._loads.items():
            counts_E = torch.tensor(load.counts, dtype=torch.float64, device=self._device)
            total = sum(load.counts)
            if total:
                self.shares[layer].copy_(counts_E / total)
            if self.balance.has_bias:
                away_E = torch.sign(total / len(counts_E) - counts_E)
                self.biases[layer].add_(away_E.to(self.dtype), alpha=self.balance.bias_rate)

    def state(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return what the next step depends on, as views, by kind and layer."""
        kinds = {"router_bias": self.biases, "router_share": self.shares}
        return {kind: held for kind, held in kinds.items() if held}
