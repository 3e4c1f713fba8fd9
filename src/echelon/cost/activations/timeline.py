# SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that a rank keeps, action by action, and the most that it holds at a time.

A microbatch leaves on a stage, after F, what its backward needs; after B (where backward is split)
what W needs; after W or BW nothing but its loss. So what a rank keeps after an action is the sum
over the pairs of a stage and a microbatch that are between F and W then, and the peak is the
largest sum of what is kept before an action and what that action has beside, in the order of the
schedule. Of a recomputed block the input alone is kept, on the device or on the host; its backward
makes all of the block again.

Formulas of what each operator keeps stand in `linear.py` (norms, MLP), `attention.py`, `latent.py`,
`experts.py` and `units.py` (embedding, loss). They are exact for the operators of `parallel/`,
every storage counted once, whatever views of it are kept. What is there while operators run is a
model of what PyTorch frees when: within 2 % of what is measured (`proof/matrix/bytes_walk.py`).

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 4; Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 3 (what waits for W).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from echelon.core.axis import Axis
from echelon.core.model_shape import LayerKind
from echelon.core.plan import Plan
from echelon.cost.activations.attention_row_chunks import AttentionRowChunks
from echelon.cost.activations.from_plan import activation_numbers_from_plan
from echelon.cost.activations.numbers import ActivationNumbers, Num, elementwise_max
from echelon.cost.activations.operator_memory import SavedTensor, total_saved_bytes
from echelon.cost.activations.peaks import (
    Moment,
    backward_moments,
    forward_moments,
    weight_gradient_moments,
)
from echelon.cost.activations.units import UnitOperators, stage_unit_operators
from echelon.layout.expert_load import ExpertLoad
from echelon.layout.layer_kinds import plan_of_layer
from echelon.layout.stage import part_of
from echelon.schedule.action import Action, ActionKind
from echelon.schedule.from_plan import schedule_from_plan

StageMicrobatch = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """Record what of a step is data: how tokens were routed, and attention of each microbatch.

    `transposed` is whether attention gave its output in another order
    (`cost/activations/numbers.py`), `row_chunks` what its kernels were called for: of a microbatch,
    and the first block of a kind of attention.
    """

    load: ExpertLoad | None = None
    transposed: Mapping[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    row_chunks: Mapping[tuple[int, int], AttentionRowChunks] = field(
        default_factory=dict[tuple[int, int], AttentionRowChunks]
    )

    @property
    def any(self) -> bool:
        """Return whether microbatches may differ."""
        return self.load is not None or bool(self.transposed or self.row_chunks)

    def numbers(
        self, plan: Plan, cp_rank: int, microbatch: int
    ) -> dict[LayerKind, ActivationNumbers]:
        """Return the numbers of a microbatch for each kind of attention."""
        found: dict[LayerKind, ActivationNumbers] = {}
        for first in plan.model.first_of_kinds:
            key = (microbatch, first)
            own = plan_of_layer(plan, first)
            x = activation_numbers_from_plan(own, cp_rank, self.row_chunks.get(key))
            x = replace(x, transposed=self.transposed.get(key, x.transposed))
            found[plan.model.layer_kind(first)] = x
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionBytes:
    """Say what a rank keeps after an action, and at most while it runs."""

    action: Action
    kept: Num
    peak: Num


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMoments:
    """Say what a rank has of activations while an action runs.

    `others` is what it keeps of all but the microbatch at hand on its stage, of which `own` is kept
    when the action begins and `moments` tell the rest. `kept` is all that is kept after it.
    """

    action: Action
    others: Num
    own: Num
    moments: Sequence[Moment]
    kept: Num


class RankActivations:
    """The activations of one rank of a plan."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        data: StepData | None = None,
        *,
        numbers: ActivationNumbers | None = None,
    ) -> None:
        """Take the routing and the tokens of `data`; without it, balanced ones.

        `numbers` are those of the rank's place among context ranks, where they are known.
        """
        self.plan, self.rank, self._data = plan, rank, data or StepData()
        self._cp_rank = plan.mesh.coordinates(rank)[Axis.CP]
        self._numbers = numbers or activation_numbers_from_plan(plan, self._cp_rank)
        self._stages = {one.stage: one for one in part_of(plan, rank).stages}
        self._empty = [stage for stage, part in self._stages.items() if not part.blocks]
        self._units: dict[StageMicrobatch, tuple[UnitOperators, ...]] = {}
        self._left: dict[tuple[ActionKind, int, int], Num] = {}
        self._moments: dict[tuple[ActionKind, int, int], Sequence[Moment]] = {}

    @property
    def row(self) -> Sequence[Action]:
        """Return the actions of this rank, in order."""
        return schedule_from_plan(self.plan).actions[self.plan.mesh.coordinates(self.rank)[Axis.PP]]

    def units(self, stage: int, microbatch: int) -> tuple[UnitOperators, ...]:
        """Return the units of a stage for one microbatch."""
        key = (stage, microbatch if self._data.any else 0)
        if key not in self._units:
            numbers = self._data.numbers(self.plan, self._cp_rank, microbatch)
            self._units[key] = stage_unit_operators(
                self.plan,
                self._stages[stage],
                next(iter(numbers.values())),
                (self.rank, microbatch, self._data.load),
                numbers,
            )
        return self._units[key]

    def kept(self, action: Action) -> tuple[SavedTensor, ...]:
        """Return what an action leaves of its microbatch until the next one that uses it."""
        units = self.units(action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            return tuple(one for unit in units for one in unit.saved)
        if action.kind is ActionKind.B:
            return tuple(one for unit in units for one in unit.kept_for_weight_gradient)
        return ()

    def actions(self) -> Iterator[ActionBytes]:
        """Yield what is kept after each action, and at most while it runs."""
        for one in self.walk(self.row):
            running = elementwise_max(one.own, self._running(one.action))
            yield ActionBytes(action=one.action, kept=one.kept, peak=one.others + running)

    def walk(self, row: Sequence[Action]) -> Iterator[ActionMoments]:
        """Yield what there is of activations while each action of `row` runs."""
        living: dict[StageMicrobatch, Num] = {}
        entered: set[StageMicrobatch] = set()
        losses: Num = 0
        total: Num = 0
        for action in row:
            key = (action.stage, action.microbatch)
            own = living.pop(key, 0)
            total = total - own
            others = losses + total - self._handed_on(living, entered | {key})
            entered.discard(key)
            if action.kind in (ActionKind.F, ActionKind.B):
                living[key] = left = self._left_by(action)
                total = total + left
            if action.kind is ActionKind.F:
                entered.add(key)
                losses = losses + self._numbers.statistics_bytes * self._stages[action.stage].last
            kept = losses + total - self._handed_on(living, entered)
            yield ActionMoments(
                action=action, others=others, own=own, moments=self.moments(action), kept=kept
            )

    def _left_by(self, action: Action) -> Num:
        """Return the bytes of what an action leaves of its microbatch."""
        key = (action.kind, action.stage, action.microbatch if self._data.any else 0)
        if key not in self._left:
            self._left[key] = total_saved_bytes(self.kept(action))
        return self._left[key]

    def _handed_on(
        self, living: Mapping[StageMicrobatch, Num], entered: set[StageMicrobatch]
    ) -> Num:
        """Return what counts twice: an empty stage hands its input on to the next one here."""
        found: Num = 0
        for stage in self._empty:
            for (other, microbatch), size in living.items():
                if other == stage and (stage + 1, microbatch) in entered:
                    found = found + size
        return found

    def moments(self, action: Action) -> Sequence[Moment]:
        """Return what an action has of its own microbatch, operator by operator."""
        key = (action.kind, action.stage, action.microbatch if self._data.any else 0)
        if key not in self._moments:
            self._moments[key] = tuple(self._found(action))
        return self._moments[key]

    def _found(self, action: Action) -> Iterator[Moment]:
        units = self.units(action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            return forward_moments(units, self._numbers)
        if action.kind is ActionKind.W:
            return weight_gradient_moments(units)
        return backward_moments(units, self._numbers, split=action.kind is ActionKind.B)

    def _running(self, action: Action) -> Num:
        """Return the most that an action has of its own microbatch, what it keeps included."""
        return elementwise_max(0, *(one.bytes for one in self.moments(action)))
