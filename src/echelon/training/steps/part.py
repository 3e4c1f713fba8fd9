# SPDX-License-Identifier: Apache-2.0
"""The seams of a step: where a mode joins the engine, the loop, checkpoints and the proof.

A mode is one `StepPart`, and one record of `core/choices/step_parts.py` that names its builder.
The engine and the loop name no mode: they call these methods, in the order in which they stand
here, on all parts of a plan as one (`StepParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import torch

from echelon.core.choices.registry import load_reference
from echelon.core.choices.step_parts import STEP_PARTS
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.rank_model import RankModel
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator
from echelon.training.observer import Absence, StepFacts

P = TypeVar("P", bound="StepPart")
V = TypeVar("V")

NamedShards = dict[str, list[Shard]]
"""Pieces of tensors, by canonical name."""

ShardsByKind = Mapping[str, Mapping[str, list[Shard]]]
"""Pieces of tensors, by kind and by canonical name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(StepFacts):
    """Result of one step; loss, tokens, grad_norm and flags are the same on every rank."""

    stop_requests: int
    """Ranks that asked to stop."""
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]
    """(data rank, microbatch) -> (sum of losses, counted tokens) of what this rank computed, its
    positions only."""

    @property
    def finite(self) -> bool:
        """True if the run may go on: all is finite, or the scale mends the overflow."""
        return isfinite(self.loss) and (self.skipped or isfinite(self.grad_norm))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Place of a part: one rank of a run, with the model that it trains."""

    run: Plan
    """The plan of the whole run."""
    plan: Plan
    """The plan of the ranks that take a step together."""
    model: RankModel
    """What this rank holds of the model."""
    masters: Mapping[str, torch.Tensor]
    """Master copies of the slices, by bucket; none if the optimizer updates parameters."""
    groups: RankGroups
    """The groups of this rank."""
    device: torch.device
    """Its device."""


class CheckpointScope:
    """Writers and contents of a run's checkpoints. Here all ranks of the run step together."""

    def exchange(self, attempt: int) -> ObjectCommunicator | None:
        """Ranks that write a checkpoint together; None for all of the run.

        An `attempt` that is not the first follows one that broke.
        """
        del attempt
        return None

    def state(self, own: ShardsByKind) -> ShardsByKind:
        """Tensors of a checkpoint on this rank; `own` is the state of the ranks of a step."""
        return own

    def position(self, own: Mapping[str, Any], exchange: ObjectCommunicator) -> Mapping[str, Any]:
        """Position that a checkpoint holds, the same on all ranks that write it."""
        del exchange
        return own

    def within(self, state: ShardsByKind, path: Path) -> ShardsByKind:
        """Tensors to read of the checkpoint at `path`, which may lack some."""
        del path
        return state

    def position_of(self, stored: Any) -> Any:
        """Position of this rank in the `stored` one of a checkpoint, which may be damaged."""
        return stored

    def take_back(self) -> None:
        """Go on from a checkpoint that lacks tensors of this rank."""


class StepPart:
    """A mode's part of a run on one rank. Here every method does nothing."""

    num_told = 0
    """Numbers that this part tells all ranks with the sums of each step."""
    begins_together = True
    """Whether all ranks of the run are there when it begins."""
    checkpoint: CheckpointScope | None = None
    """Checkpoints of a run whose ranks do not all step together; one part at most has this."""

    # A step.

    def running(self, loss_scale: float) -> AbstractContextManager[None]:
        """Context of forward and backward of a step, the loss of which is times `loss_scale`."""
        del loss_scale
        return nullcontext()

    def gradients_complete(self) -> Sequence[float]:
        """Learn that all gradients are summed; the `num_told` numbers for all ranks."""
        return (0.0,) * self.num_told

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        """Result with the facts of this part, from `rows` [ranks, num_told] of all ranks."""
        del rows
        return result

    def held_back(self, step: int) -> Collection[str]:
        """Buckets whose updated slices `after_update` reads or changes before they are sent."""
        del step
        return ()

    def updated(self, bucket: Bucket) -> None:
        """Learn that a slice has its new values, which are sent to other ranks now."""

    def after_update(self, step: int, *, skipped: bool) -> Sequence[Bucket]:
        """Change what follows from the update; the buckets to send to other ranks."""
        del step, skipped
        return ()

    def end_step(self, result: StepResult) -> StepResult:
        """End a step whose result is finite; the result that the engine returns."""
        return result

    def mean_loss(self, loss: float, tokens: int) -> float:
        """Loss of the run from the mean `loss` over `tokens` of this rank's batch."""
        del tokens
        return loss

    def settle(self) -> None:
        """Wait until nothing is under way: tensors are in memory, and change no more."""

    # A run.

    def connect(
        self, context: RankContext, message_s: float, ends_after: int
    ) -> Callable[[], int | None] | None:
        """Learn where other ranks are met, and after how many steps the run ends.

        Of a rank that comes into a run that goes on, the function that waits for this: it returns
        the steps that are done, or None if the run is over. None of all other ranks.
        """
        del context, message_s, ends_after
        return None

    def begin(self, step: int) -> None:
        """Begin to take steps after `step`: weights are those of a seed, a file, a checkpoint."""

    def speaks(self, step: int) -> bool | None:
        """True if this rank reports the run after `step`; None if no part changes that."""
        del step
        return None

    def facts(self, result: StepResult) -> StepResult:
        """Facts of a step for an observer of the whole run."""
        return result

    def news(self) -> Sequence[str]:
        """Other events since the last time, in words."""
        return ()

    def end(self, steps: int) -> Sequence[Absence]:
        """End the run after `steps`, without waiting; the absences of ranks."""
        del steps
        return ()

    # Its state, the proof of it, and the memory that it takes.

    def tensors(self) -> ShardsByKind:
        """Tensors that the next step takes over, as views.

        A file of weights may have some of them, under names that no parameter has.
        """
        return {}

    def start_from_weights(self) -> None:
        """Take over parameters that were read from a file, or that ranks begin with."""

    def position(self) -> Mapping[str, Any]:
        """State of the next step that is no tensor, as JSON by the keys of this part."""
        return {}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from a position, which has the keys of all parts."""

    def shared_state(self, held: NamedShards) -> NamedShards:
        """State that ranks which hold the same must agree on, by its name in an error."""
        return held

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Tensors that grow with the model, by the term of their bytes."""
        return {}

    def proven(self) -> ShardsByKind:
        """Values that a proof compares with the reference, by kind."""
        return {}


class StepParts(StepPart):
    """All parts of a rank: each method asks the parts in their order."""

    def __init__(self, parts: Sequence[StepPart]) -> None:
        self._all = tuple(parts)
        self.num_told = sum(part.num_told for part in self._all)
        self.begins_together = all(part.begins_together for part in self._all)
        scopes = [part.checkpoint for part in self._all if part.checkpoint is not None]
        (self.scope,) = scopes or [CheckpointScope()]

    def __iter__(self) -> Iterator[StepPart]:
        """The parts in their order."""
        return iter(self._all)

    def find(self, kind: type[P]) -> P | None:
        """The part of a class; None under a plan without it."""
        return next((part for part in self._all if isinstance(part, kind)), None)

    @contextmanager
    def running(self, loss_scale: float) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._all:
                stack.enter_context(part.running(loss_scale))
            yield

    def gradients_complete(self) -> Sequence[float]:
        return [number for part in self._all for number in part.gradients_complete()]

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        columns = rows.split([part.num_told for part in self._all], dim=1)
        for part, told in zip(self._all, columns, strict=True):
            result = part.agreed(result, told)
        return result

    def held_back(self, step: int) -> Collection[str]:
        return {name for part in self._all for name in part.held_back(step)}

    def updated(self, bucket: Bucket) -> None:
        for part in self._all:
            part.updated(bucket)

    def after_update(self, step: int, *, skipped: bool) -> Sequence[Bucket]:
        return [bucket for part in self._all for bucket in part.after_update(step, skipped=skipped)]

    def end_step(self, result: StepResult) -> StepResult:
        for part in self._all:
            result = part.end_step(result)
        return result

    def mean_loss(self, loss: float, tokens: int) -> float:
        for part in self._all:
            loss = part.mean_loss(loss, tokens)
        return loss

    def settle(self) -> None:
        for part in self._all:
            part.settle()

    def connect(
        self, context: RankContext, message_s: float, ends_after: int
    ) -> Callable[[], int | None] | None:
        entries = [part.connect(context, message_s, ends_after) for part in self._all]
        return next((enter for enter in entries if enter is not None), None)

    def begin(self, step: int) -> None:
        for part in self._all:
            part.begin(step)

    def speaks(self, step: int) -> bool | None:
        answers = [now for part in self._all if (now := part.speaks(step)) is not None]
        return all(answers) if answers else None

    def facts(self, result: StepResult) -> StepResult:
        for part in self._all:
            result = part.facts(result)
        return result

    def news(self) -> Sequence[str]:
        return [text for part in self._all for text in part.news()]

    def end(self, steps: int) -> Sequence[Absence]:
        return [absence for part in self._all for absence in part.end(steps)]

    def tensors(self) -> ShardsByKind:
        return _union(part.tensors() for part in self._all)

    def start_from_weights(self) -> None:
        for part in self._all:
            part.start_from_weights()

    def position(self) -> Mapping[str, Any]:
        return _union(part.position() for part in self._all)

    def resume(self, position: Mapping[str, Any]) -> None:
        for part in self._all:
            part.resume(position)

    def shared_state(self, held: NamedShards) -> NamedShards:
        for part in self._all:
            held = part.shared_state(held)
        return held

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return _union(part.held() for part in self._all)

    def proven(self) -> ShardsByKind:
        return _union(part.proven() for part in self._all)


def step_parts(place: StepPlace, *own: StepPart) -> StepParts:
    """Parts of a rank: the engine's `own`, then the parts of the modes of its plan."""
    built = [load_reference(record.part)(place) for record in STEP_PARTS.values() if record.part]
    return StepParts([*own, *(part for part in built if part is not None)])


def _union(of_parts: Iterable[Mapping[str, V]]) -> dict[str, V]:
    """Entries of all parts. No key may be in two parts: a checkpoint would lose values."""
    union: dict[str, V] = {}
    for entries in of_parts:
        shared = sorted(union.keys() & entries.keys())
        assert not shared, f"two step parts have the keys {shared}"
        union |= entries
    return union
