"""Modules under tensor ranks with stages and context ranks, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.errors import EchelonError
from echelon.core.event import EventList
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.layout.modules import ModuleSplit
from echelon.proof.verify.reference import StayWide
from tests.parallel.module.pipeline.targets import Case, Trained, Values, one_process, plan
from tests.parallel.module.tensor.families import LENGTH, OWN_RULES, Own, make


class Placed(Own):
    """A decoder that may be told which positions it has."""

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [B, T, V] of ids [B, T]."""
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1]).expand_as(ids)
        x = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed(Case):
    """A model of `tensor/families.py` under several axes."""

    kind: str = "own"
    length: int = LENGTH
    attention: str = "eager"
    frozen: tuple[str, ...] = ()

    @property
    def tensor(self) -> Any:
        """Return the rules of tensor ranks."""
        return OWN_RULES if self.kind == "own" else "auto"

    def make(self) -> nn.Module:
        """Return the module."""
        model: Any = make(self.kind)
        if self.kind == "own":
            model.__class__ = Placed
        else:
            model.config._attn_implementation = self.attention
            model.config.use_cache = False
        for name, parameter in model.named_parameters():
            if name.startswith(self.frozen) and self.frozen:
                parameter.requires_grad_(False)
        return model

    def batch(self, step: int) -> dict[str, Any]:
        """Return the global batch of a step."""
        made = Case.batch(self, step)
        ids = made.get("tokens", made.get("input_ids"))
        return {"ids" if self.kind == "own" else "input_ids": ids, "labels": made["labels"]}


@dataclass(slots=True, kw_only=True)
class ComposedTrained(Trained):
    """What a rank saw; `split` is what tensor ranks hold."""

    split: ModuleSplit
    data_rank: int


def composed_plan(**changes: Any) -> Plan:
    """Return a plan of two blocks over the axes that `changes` name."""
    return plan(**{"layers": 2, "pp": 1, "microbatches": 2, **changes})


def train(context: RankContext, case: Composed) -> ComposedTrained:
    """Train on this rank; start from other values on the others than rank 0."""
    model, events = case.make(), EventList()
    if context.rank > 0:
        with torch.no_grad():
            for one in model.parameters():
                one.add_(1.0)
    with StayWide():
        model, optimizer = parallelize(
            model,
            case.plan,
            split=case.split,
            loss="causal",
            example=case.example(),
            tensor=case.tensor,
            events=events,
        )
    losses: list[float] = []
    norms: list[float] = []
    for step in range(case.steps):
        events.events.clear()
        with StayWide():
            losses.append(optimizer.backward(case.batch(step)).loss)
        norms.append(optimizer.step().grad_norm)
    sent = events.bytes_by_axis()
    sent.pop("world", None)
    after: Values = {}
    optimizer.full_state(lambda kind, name, one: after.__setitem__(f"{kind} {name}", one))
    with StayWide():
        evaluated = optimizer.evaluate(case.batch(50)).loss
    optimizer.close()
    return ComposedTrained(
        losses=losses,
        norms=norms,
        gradients={},
        after=after,
        sent=sent,
        buckets=optimizer.module.plans,
        evaluated=evaluated,
        split=optimizer.module.split,
        data_rank=optimizer.data_rank,
    )


def on_one_device(case: Composed) -> Trained:
    """Train the module as it is with torch alone."""
    with StayWide():
        return one_process(case)


def saved_and_loaded(context: RankContext, given: tuple[Composed, str, bool]) -> Values:
    """Take one step and save to a file, or go on from it for another; return everything."""
    case, file, first = given
    _, optimizer = parallelize(
        case.make(),
        case.plan,
        split=case.split,
        loss="causal",
        example=case.example(),
        tensor=case.tensor,
    )
    if not first:
        optimizer.load(file)
    with StayWide():
        optimizer.backward(case.batch(0 if first else 1))
    optimizer.step()
    if first:
        optimizer.save(file)
    after: Values = {}
    optimizer.full_state(lambda kind, name, one: after.__setitem__(f"{kind} {name}", one))
    return after


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a rank sees inside of `whole`, and what is there after it."""

    shown: Values
    """What `model.state_dict()` is there, after one step."""
    full: Values
    """The parameters of the whole state, on rank 0."""
    untouched: bool
    """Whether this rank's slices were the same after looking alone."""
    loaded: Values
    """The whole state after halves of all parameters were loaded."""
    given: Values
    """Those halves."""
    rules: tuple[str, ...]
    """By which rules a forward was refused."""
    losses: list[float]
    """What one more step said."""


def shown_whole(context: RankContext, case: Composed) -> Shown:
    """Look at a module inside of `whole` after one step, and load other values there."""
    with StayWide():
        model, optimizer = parallelize(
            case.make(),
            case.plan,
            split=case.split,
            loss="causal",
            example=case.example(),
            tensor=case.tensor,
        )
        optimizer.backward(case.batch(0))
        optimizer.step()

    def parameters() -> Values:
        found: Values = {}
        optimizer.full_state(lambda kind, name, one: found.__setitem__(f"{kind} {name}", one))
        return {
            name.removeprefix("parameters "): one
            for name, one in found.items()
            if name.startswith("parameters ")
        }

    full, before = parameters(), optimizer.state_dict()
    rules: tuple[str, ...] = ()
    with optimizer.whole():
        shown = {name: one.detach().clone() for name, one in model.state_dict().items()}
        try:
            model(case.batch(0)["ids" if case.kind == "own" else "input_ids"])
        except EchelonError as error:
            rules = error.rules
    after = optimizer.state_dict()
    untouched = all(
        torch.equal(one, after["tensors"][kind][name])
        for kind, held in before["tensors"].items()
        for name, one in held.items()
    )
    given = {name: one * 0.5 for name, one in shown.items()}
    with optimizer.whole():
        model.load_state_dict(given)
    loaded = parameters()
    with StayWide():
        losses = [optimizer.backward(case.batch(1)).loss]
    optimizer.step()
    return Shown(
        shown=shown,
        full=full,
        untouched=untouched,
        loaded=loaded,
        given=given,
        rules=rules,
        losses=losses,
    )
