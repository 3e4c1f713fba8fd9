# SPDX-License-Identifier: Apache-2.0
"""One sequence on its way through a model: what is read, and what is noted of every part.

A model is a function of a sequence; batches are loops over them. What each part makes of it is
noted under (unit, part, number), so that the first part that another implementation computes
otherwise can be named.

Shape suffixes: T positions, V vocabulary, K experts of a token, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import ModelShape
from echelon.proof.independent.fp8 import UNROUNDED, Fp8Rules, fp8_product, layers_that_share
from echelon.proof.independent.weights import key_of, uniforms

EMBEDDING_UNIT = "embedding"
HEAD_UNIT = "head"

PartKey = tuple[str, str, int]
"""A unit ("embedding", "layers.3", "head"), a part in words, and which of those of the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRoutes:
    """Say how one layer routed the tokens of a sequence, and with which probabilities."""

    logits_TE: torch.Tensor
    scores_TE: torch.Tensor
    chosen: list[list[int]]
    gates_TK: torch.Tensor
    kept: list[list[bool]]


@dataclass(slots=True, kw_only=True)
class SequenceRun:
    """Hold a sequence, the weights that it meets, and what is noted on its way."""

    model: ModelShape
    """The shape of the model."""
    weights: Mapping[str, torch.Tensor]
    """Its weights, by name."""
    balance: Balance
    """By which rules experts have room for it."""
    biases: Mapping[int, torch.Tensor]
    """What is added to router scores in the choice of experts, by block."""
    tokens: list[int]
    """Token ids, one for each position."""
    documents: tuple[int, ...]
    """Where its documents start; only 0 where all are joined."""
    sample: int
    """Global number of the sequence."""
    step: int
    """The optimizer step."""
    seed: int
    """The seed of the run."""
    fp8: Fp8Rules | None = None
    """How products of 8-bit numbers round; None where there are none."""
    unit: str = EMBEDDING_UNIT
    """The unit that it is in."""
    parts: dict[PartKey, torch.Tensor] = field(default_factory=dict[PartKey, torch.Tensor])
    """What the parts made of it, in order."""
    routes: dict[int, SequenceRoutes] = field(default_factory=dict[int, SequenceRoutes])
    """How each layer with experts routed it."""
    heads: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Queries, keys and values of each block, as they meet."""

    def note(self, part: str, y: torch.Tensor) -> torch.Tensor:
        """Return y, and keep it as the next `part` of the unit."""
        number = sum(key[:2] == (self.unit, part) for key in self.parts)
        self.parts[self.unit, part, number] = y.detach()
        return y

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight of the block that the sequence is in."""
        return self.weights[f"{self.unit}.{name}"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return x W^T + b, for a linear layer of the block; b where there is one."""
        weight = self.weight(f"{name}.weight")
        if self.fp8 is not None and name not in UNROUNDED:
            group, pattern = layers_that_share(f"{self.unit}.{name}")
            y = fp8_product(x, weight, self.fp8, group, self._largest(pattern))
        else:
            y = x @ weight.T
        if self.model.lora is not None and name.rpartition(".")[2] in self.model.lora.targets:
            lora = self.model.lora
            divisor = math.sqrt(lora.rank) if lora.rslora else lora.rank
            inner = x @ self.weight(f"{name}.lora_a.weight").T
            y = y + (lora.alpha / divisor) * (inner @ self.weight(f"{name}.lora_b.weight").T)
        bias = self.weights.get(f"{self.unit}.{name}.bias")
        return y if bias is None else y + bias

    def _largest(self, pattern: str) -> float:
        """Return the largest of all numbers of weights whose names are as a pattern says."""
        found = [one for name, one in self.weights.items() if re.fullmatch(pattern, name)]
        return max(float(one.detach().abs().max()) for one in found)

    def dropped_out(self, x_TD: torch.Tensor, site: str) -> torch.Tensor:
        """Return x with elements dropped: those whose uniform value is below the probability.

        An element has the index (sample x T + position) x width + channel under the key
        ("dropout", seed, step, site); what stays is divided by 1 - p (Srivastava et al., 2014).
        """
        p = self.model.dropout
        if p == 0.0:
            return x_TD
        length, width = x_TD.shape
        key = key_of("dropout", self.seed, self.step, site)
        drawn = uniforms(key, self.sample * length * width, length * width)
        kept = torch.from_numpy(drawn >= p).reshape(length, width)
        return self.note("dropout", torch.where(kept, x_TD / (1 - p), 0.0))


def root_mean_square_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm over the last dim (Zhang and Sennrich, 2019)."""
    return scale * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def layer_norm(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return LayerNorm over the last dim (Ba et al., 2016): the variance is that of all of x."""
    centred = x - x.mean(-1, keepdim=True)
    return scale * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) + bias
