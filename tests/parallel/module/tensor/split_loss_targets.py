"""Modules that do something with their logits, on two tensor ranks and in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from echelon.api.parallelizing import parallelize
from echelon.core.event import EventList
from echelon.launch.context import RankContext
from echelon.parallel.module.loss import CAUSAL
from tests.parallel.module.composed.composed_targets import Composed, composed_plan
from tests.parallel.module.tensor.families import OWN_RULES, VOCAB, Own

LOGITS = ("plain", "capped", "normed", "shifted")
"""What a module does with its logits: nothing, something to each, something to all together."""


class OfLogits(Own):
    """A decoder that does something with its logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, VOCAB))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, V]."""
        logits = super().forward(ids)
        if self.kind == "capped":
            logits = (logits[:, :, :] * 3.0 / 2.0).float().double().tanh() * 2.0
        if self.kind == "normed":
            logits = F.layer_norm(logits, (VOCAB,))
        return logits + self.shift if self.kind == "shifted" else logits


def made(kind: str) -> tuple[OfLogits, dict[str, Any]]:
    """Return a module in float64, and a global batch."""
    torch.manual_seed(3)
    model = OfLogits(kind).double()
    return model, Composed(plan=composed_plan(tp=2)).batch(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a rank saw of a step."""

    losses: list[float]
    norms: list[float]
    evaluated: float
    sent: list[dict[str, int]]


def train(context: RankContext, kind: str) -> Seen:
    """Take two steps on two tensor ranks; `sent` are the bytes of each name in a step."""
    model, batch = made(kind)
    events = EventList()
    _, optimizer = parallelize(
        model, composed_plan(tp=2), tensor=OWN_RULES, loss="causal", events=events
    )
    losses: list[float] = []
    norms: list[float] = []
    sent: list[dict[str, int]] = []
    for _ in range(2):
        events.events.clear()
        losses.append(optimizer.backward(batch).loss)
        norms.append(optimizer.step().grad_norm)
        names: dict[str, int] = {}
        for one in events.events:
            names[one.name] = names.get(one.name, 0) + one.bytes
        sent.append(names)
    return Seen(losses=losses, norms=norms, evaluated=optimizer.evaluate(batch).loss, sent=sent)


def first_step(kind: str) -> tuple[float, float]:
    """Return loss and gradient norm of one process."""
    model, batch = made(kind)
    prepared = CAUSAL.prepare(batch)
    loss = CAUSAL.sum_of(model(prepared["ids"]), prepared) / CAUSAL.count_of(prepared)
    loss.backward()
    squares = [one.grad.square().sum() for one in model.parameters() if one.grad is not None]
    return float(loss.detach()), float(torch.stack(squares).sum().sqrt())
