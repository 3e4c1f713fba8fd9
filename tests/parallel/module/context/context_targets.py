"""What ranks run in the tests of context parallelism of any module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from echelon.api.parallelizing import parallelize
from echelon.core.errors import EchelonError
from echelon.core.event import EventList
from echelon.launch.context import RankContext
from echelon.parallel.module.context import SeenAttention, SeenCall
from echelon.proof.verify.reference import StayWide
from tests.parallel.module.pipeline.targets import Case, Trained, Values, stock

WIDTH, VOCAB = 12, 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Case):
    """A module whose sequences are cut; the kind "own" is a module of these tests."""

    length: int = 16
    mistake: str = ""

    @property
    def split(self) -> str:
        """Return the name of the list of blocks."""
        return "blocks" if self.kind == "own" else Case.split.fget(self)  # pyright: ignore[reportOptionalCall]

    def make(self) -> nn.Module:
        """Return the module."""
        if self.kind == "own":
            torch.manual_seed(5)
            return Own(self.mistake).double()
        return stock(self.kind, **{"attn_implementation": "sdpa", **(self.changes or {})})


class Own(nn.Module):
    """Two layers of attention of an unusual scale; the positions are given."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Layer(mistake) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self._mistake = mistake

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        if position_ids is None or self._mistake == "positions":
            position_ids = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embedding(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        if self._mistake == "mean":
            x = x + x.mean(1, keepdim=True)
        return self.head(x)


class Layer(nn.Module):
    """Attention with two query heads to a key head, and an MLP."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH))
        self._mistake = mistake

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._mistake in ("checkpointed", "reentrant"):
            reentrant = self._mistake == "reentrant"
            again: Any = torch.utils.checkpoint.checkpoint(self._attend, x, use_reentrant=reentrant)  # pyright: ignore[reportAttributeAccessIssue]
            x = x + again
        else:
            x = x + self._attend(x)
        return x + self.mlp(x)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 3)).permute(2, 0, 3, 1, 4)
        if self._mistake == "eager":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2)
        mask = None
        if self._mistake == "bias":
            mask = torch.randn(x.shape[1], x.shape[1], dtype=x.dtype)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.3, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)


@dataclass(slots=True, kw_only=True)
class CutTrained(Trained):
    """What a rank saw, and the calls of attention."""

    calls: list[SeenCall]


def train(context: RankContext, case: Cut) -> CutTrained:
    """Train on this rank, as `one_process` does: nothing is narrowed to float32."""
    with StayWide():
        return _train(case)


def _train(case: Cut) -> CutTrained:
    model, events = case.make(), EventList()
    model, optimizer = parallelize(
        model, case.plan, split=case.split, loss="causal", example=case.example(), events=events
    )
    losses: list[float] = []
    norms: list[float] = []
    for step in range(case.steps):
        events.events.clear()
        losses.append(optimizer.backward(case.batch(step)).loss)
        norms.append(optimizer.step().grad_norm)
    sent = events.bytes_by_axis()
    after: Values = {}
    optimizer.full_state(lambda kind, name, one: after.__setitem__(f"{kind} {name}", one))
    seen = SeenAttention()
    with seen, torch.no_grad():
        case.make()(**{n: one for n, one in case.batch(0).items() if n != "labels"})
    return CutTrained(
        losses=losses,
        norms=norms,
        gradients={},
        after=after,
        sent=sent,
        buckets=optimizer.module.plans,
        evaluated=optimizer.evaluate(case.batch(50)).loss,
        calls=seen.calls,
    )


def refused(context: RankContext, case: Cut) -> str:
    """Return why a module is not cut, or not trained."""
    try:
        _, optimizer = parallelize(case.make(), case.plan, loss="causal", example=case.example())
        optimizer.backward(case.batch(0))
    except EchelonError as error:
        return str(error)
    return ""
