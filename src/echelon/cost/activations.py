"""Bytes of activations that a rank keeps, action by action, and the most that it holds at a time.

A microbatch leaves on a stage, after F, what its backward needs; after B (where backward is split)
what W needs; after W or BW nothing but its loss. So what a rank keeps after an action is the sum
over the pairs of a stage and a microbatch that are between F and W then, and the peak is the
largest sum of what is kept before an action and what that action has beside, in the order of the
schedule. Of a recomputed block the input alone is kept, on the device or on the host; its backward
makes all of the block again.

Formulas of what each operator keeps: `activations_linear.py` (norms, MLP),
`activations_attention.py`, `activations_latent.py`, `activations_experts.py`,
`activations_ends.py` (embedding, loss). They are exact for the operators of `parallel/`, every
storage counted once, whatever views of it are kept. What is there while operators run is a model of
what PyTorch frees when: within 2 % of what is measured (`prove/bytes_walk.py`).

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4; Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3 (what waits for W).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.activation_numbers import ActivationNumbers, Num, Saved, most, total
from echelon.cost.activation_peaks import backward_peak, forward_peak
from echelon.cost.activation_units import Unit, stage_units
from echelon.cost.activations_working import AttentionPieces
from echelon.cost.expert_load import ExpertLoad
from echelon.cost.stage import part_of
from echelon.cost.terms import HeldTerm
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.of_plan import schedule_of

Key = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """Record what of a step is data: how tokens were routed, and two numbers of each microbatch.

    `found` are the tokens of a microbatch whose row of the embedding is on this rank, `transposed`
    whether attention gave its output in another order (`cost/activation_numbers.py`), `pieces` what
    its kernels were called for.
    """

    load: ExpertLoad | None = None
    found: Mapping[int, int] = field(default_factory=dict[int, int])
    transposed: Mapping[int, int] = field(default_factory=dict[int, int])
    pieces: Mapping[int, AttentionPieces] = field(default_factory=dict[int, AttentionPieces])

    @property
    def any(self) -> bool:
        """Return whether microbatches may differ."""
        return self.load is not None or bool(self.found or self.transposed or self.pieces)

    def numbers(self, plan: Plan, cp_rank: int, microbatch: int) -> ActivationNumbers:
        """Return the numbers of a microbatch."""
        x = ActivationNumbers.of(plan, cp_rank, self.pieces.get(microbatch))
        return replace(
            x,
            found=self.found.get(microbatch, x.found),
            transposed=self.transposed.get(microbatch, x.transposed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionBytes:
    """Say what a rank keeps after an action, and at most while it runs."""

    action: Action
    kept: Num
    peak: Num
    living: tuple[Action, ...] = ()


class RankActivations:
    """The activations of one rank of a plan."""

    def __init__(self, plan: Plan, rank: int, data: StepData | None = None) -> None:
        """Take the routing and the tokens of `data`; without it, balanced ones."""
        self.plan, self.rank, self._data = plan, rank, data or StepData()
        self._cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
        self._numbers = ActivationNumbers.of(plan, self._cp_rank)
        self._stages = {one.stage: one for one in part_of(plan, rank).stages}
        self._units: dict[Key, tuple[Unit, ...]] = {}
        self._peaks: dict[tuple[ActionKind, int, int], Num] = {}

    @property
    def row(self) -> Sequence[Action]:
        """Return the actions of this rank, in order."""
        return schedule_of(self.plan).actions[self.plan.mesh.coordinates(self.rank)[Axis.PP]]

    def units(self, stage: int, microbatch: int) -> tuple[Unit, ...]:
        """Return the units of a stage for one microbatch."""
        key = (stage, microbatch if self._data.any else 0)
        if key not in self._units:
            numbers = self._data.numbers(self.plan, self._cp_rank, microbatch)
            self._units[key] = stage_units(
                self.plan, self._stages[stage], numbers, (self.rank, microbatch, self._data.load)
            )
        return self._units[key]

    def kept(self, action: Action) -> tuple[Saved, ...]:
        """Return what an action leaves of its microbatch until the next one that uses it."""
        units = self.units(action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            return tuple(one for unit in units for one in unit.saved)
        if action.kind is ActionKind.B:
            return tuple(one for unit in units for one in unit.waits)
        return ()

    def actions(self) -> Iterator[ActionBytes]:
        """Yield what is kept after each action, and at most while it runs."""
        living: dict[Key, Num] = {}
        entered: set[Key] = set()
        losses: Num = 0
        for action in self.row:
            key = (action.stage, action.microbatch)
            own = living.pop(key, 0)
            others = losses + self._sum(living, entered | {key})
            entered.discard(key)
            if action.kind in (ActionKind.F, ActionKind.B):
                living[key] = total(self.kept(action))
            if action.kind is ActionKind.F:
                entered.add(key)
                losses = losses + self._numbers.wide * self._stages[action.stage].last
            running = most(own, self._running(action))
            kept = losses + self._sum(living, entered)
            left = tuple(
                Action(ActionKind.F if one in entered else ActionKind.B, *one) for one in living
            )
            yield ActionBytes(action=action, kept=kept, peak=others + running, living=left)

    def _sum(self, living: Mapping[Key, Num], entered: set[Key]) -> Num:
        """Return the bytes of all pairs; an empty stage hands its input on to the next one."""
        found: Num = 0
        for (stage, microbatch), size in living.items():
            handed_on = not self._stages[stage].blocks and (stage + 1, microbatch) in entered
            found = found + (0 if handed_on else size)
        return found

    def _running(self, action: Action) -> Num:
        """Return the most that an action has of its own microbatch, what it keeps included."""
        key = (action.kind, action.stage, action.microbatch if self._data.any else 0)
        if key not in self._peaks:
            self._peaks[key] = self._peak(action)
        return self._peaks[key]

    def _peak(self, action: Action) -> Num:
        units = self.units(action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            return forward_peak(units, self._numbers)
        if action.kind is ActionKind.W:
            return total(self.kept(replace(action, kind=ActionKind.B)))
        return backward_peak(units, self._numbers, split=action.kind is ActionKind.B)


def activation_rows(plan: Plan, rank: int) -> tuple[HeldTerm, ...]:
    """Return the activations of a rank when there are most of them, term by term.

    What is kept for backward (or W) of all microbatches, by operator, and what the action at work
    has beside. The terms add up to the peak. Stored inputs on the host are a term of that pool.
    """
    found = RankActivations(plan, rank)
    actions = list(found.actions())
    if not actions:
        return ()
    place = max(range(len(actions)), key=lambda one: actions[one].peak)
    top, before = actions[place], actions[place - 1].living if place else ()
    own = (top.action.stage, top.action.microbatch)
    kept: dict[str, tuple[int, list[str]]] = {}
    for action in before:
        if (action.stage, action.microbatch) == own:
            continue
        for one in found.kept(action):
            size, formulas = kept.setdefault(one.operator, (0, []))
            formulas += [one.formula] * (one.formula not in formulas and int(one.bytes) > 0)
            kept[one.operator] = (size + int(one.bytes), formulas)
    terms = [
        HeldTerm(name=f"{name}, kept", bytes=size, formula=" + ".join(formulas))
        for name, (size, formulas) in kept.items()
        if size
    ]
    rest = int(top.peak) - sum(term.bytes for term in terms)
    terms.append(
        HeldTerm(
            name=f"{top.action} at work",
            bytes=rest,
            formula="its operators, their inputs and gradients; losses",
        )
    )
    on_host = _most_on_host(found, actions)
    if on_host:
        terms.append(
            HeldTerm(name="stored inputs", bytes=on_host, formula="blocks n D s", pool="host")
        )
    return tuple(terms)


def _most_on_host(found: RankActivations, actions: Sequence[ActionBytes]) -> int:
    """Return the most bytes of inputs of recomputed blocks that wait on the host."""
    return max(
        sum(
            int(unit.stored.bytes)
            for action in one.living
            if action.kind is ActionKind.F
            for unit in found.units(action.stage, action.microbatch)
            if unit.on_host and unit.stored is not None
        )
        for one in actions
    )
