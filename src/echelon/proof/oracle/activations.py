# SPDX-License-Identifier: Apache-2.0
"""What passes between the parts of the model on one device, forward and backward.

Shape suffixes: B sequences of the global batch, T positions, N = T * B, E experts, K experts of a
token, W numbers of a token (hidden, or experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder, listen_to_boundaries
from echelon.proof.oracle.routing import RoutedLayer

Activations = Mapping[str, torch.Tensor]
"""What passed each boundary, [B, T, W], in the order of the forward pass."""


@dataclass(slots=True)
class HeardActivations:
    """Hold what passed each boundary, [B, T, D], and the gradients there as far as they came."""

    forward: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def hear(self, name: str, x_ND: torch.Tensor, batch: TokenBatch) -> None:
        """Keep what passes a boundary; gradients that come in several parts add up."""
        count = batch.num_sequences
        self.forward[name] = _by_sequence(x_ND, count)

        def on_gradient(dx_ND: torch.Tensor) -> None:
            part = _by_sequence(dx_ND, count)
            before = self.gradients.get(name)
            self.gradients[name] = part if before is None else before + part

        if x_ND.requires_grad:
            x_ND.register_hook(on_gradient)

    def backward(self) -> Activations:
        """Return the gradients in the order of the backward pass."""
        names = (name for name in reversed(self.forward) if name in self.gradients)
        return {name: self.gradients[name] for name in names}


def _by_sequence(x_ND: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return rows of tokens, sequence first, as [B, T, D] of their own."""
    return x_ND.detach().unflatten(0, (-1, num_sequences)).transpose(0, 1).clone()


@contextmanager
def hearing(model: Decoder) -> Iterator[HeardActivations]:
    """Hear what passes the boundaries of a model."""
    heard = HeardActivations()
    handles = listen_to_boundaries(model, heard.hear)
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def with_routers(forward: Activations, routed: Mapping[int, RoutedLayer]) -> Activations:
    """Return the activations and, before each mixture of experts, its scores and gates."""
    found: dict[str, torch.Tensor] = {}
    for name, value in forward.items():
        prefix, _, part = name.rpartition(".")
        layer = int(prefix.partition(".")[2]) if prefix else -1
        if part == "mlp" and layer in routed:
            one = routed[layer]
            found[f"{prefix}.scores"] = one.wanted_BTE
            gates_BTE = one.gates_BTK.new_zeros(one.wanted_BTE.shape)
            found[f"{prefix}.gates"] = gates_BTE.scatter(-1, one.picked_BTK, one.gates_BTK)
        found[name] = value
    return found
