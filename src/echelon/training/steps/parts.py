# SPDX-License-Identifier: Apache-2.0
"""All step parts of a rank as one, assembled from its plan in one place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from echelon.core.choices.registry import load_reference
from echelon.core.choices.step_parts import STEP_PARTS
from echelon.launch.context import RankContext
from echelon.parallel.storage.buckets import Bucket
from echelon.training.checkpoint.communicator import ObjectCommunicator
from echelon.training.observer import Absence
from echelon.training.steps.part import (
    NamedShards,
    ShardsByKind,
    StepPart,
    StepPlace,
    StepResult,
)

P = TypeVar("P", bound=StepPart)
V = TypeVar("V")


class StepParts(StepPart):
    """Call the parts of a rank, in their order."""

    def __init__(self, parts: Sequence[StepPart]) -> None:
        """Call `parts`."""
        self._all = tuple(parts)
        self.num_told = sum(part.num_told for part in self._all)
        self.begins_together = all(part.begins_together for part in self._all)

    def __iter__(self) -> Iterator[StepPart]:
        """Yield the parts."""
        return iter(self._all)

    def find(self, kind: type[P]) -> P | None:
        """Return the part of a class; None under a plan without it."""
        return next((part for part in self._all if isinstance(part, kind)), None)

    def start_step(self, loss_scale: float) -> None:
        """Begin a step."""
        for part in self._all:
            part.start_step(loss_scale)

    def running(self) -> AbstractContextManager[None]:
        """Return what forward and backward of a step run in."""
        return _inside(self._all)

    def gradients_complete(self) -> Sequence[float]:
        """Return the numbers of all parts, one after the other."""
        return [number for part in self._all for number in part.gradients_complete()]

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        """Return the result with the facts of all parts, each of which has its columns."""
        columns = rows.split([part.num_told for part in self._all], dim=1)
        for part, told in zip(self._all, columns, strict=True):
            result = part.agreed(result, told)
        return result

    def before_update(self, step: int) -> None:
        """Begin to update."""
        for part in self._all:
            part.before_update(step)

    def holds_back(self, bucket: Bucket) -> bool:
        """Return whether any part reads or changes a slice after the update."""
        return any(part.holds_back(bucket) for part in self._all)

    def updated(self, bucket: Bucket) -> None:
        """Learn that a slice has its new values."""
        for part in self._all:
            part.updated(bucket)

    def after_update(self, step: int, *, skipped: bool) -> Sequence[Bucket]:
        """Return the buckets that parts changed or held back."""
        return [bucket for part in self._all for bucket in part.after_update(step, skipped=skipped)]

    def end_step(self, result: StepResult) -> StepResult:
        """End a step."""
        for part in self._all:
            result = part.end_step(result)
        return result

    def mean_loss(self, loss: float, tokens: int) -> float:
        """Return the loss of the run."""
        for part in self._all:
            loss = part.mean_loss(loss, tokens)
        return loss

    def settle(self) -> None:
        """Return when nothing is under way."""
        for part in self._all:
            part.settle()

    def connect(self, context: RankContext, message_s: float, ends_after: int) -> None:
        """Learn where other ranks are met."""
        for part in self._all:
            part.connect(context, message_s, ends_after)

    @property
    def comes_late(self) -> bool:
        """Return whether this rank comes into a run that goes on."""
        return any(part.comes_late for part in self._all)

    def come_in(self) -> int | None:
        """Come into a run that goes on; one part knows how."""
        (part,) = (part for part in self._all if part.comes_late)
        return part.come_in()

    def begin(self, step: int) -> None:
        """Begin to take steps after `step`."""
        for part in self._all:
            part.begin(step)

    def speaks(self, step: int) -> bool | None:
        """Return whether this rank tells of the run; None if no part changes that."""
        said = [now for part in self._all if (now := part.speaks(step)) is not None]
        return all(said) if said else None

    def facts(self, result: StepResult) -> StepResult:
        """Return what an observer of the whole run is told of a step."""
        for part in self._all:
            result = part.facts(result)
        return result

    def news(self) -> Sequence[str]:
        """Return what else happened."""
        return [text for part in self._all for text in part.news()]

    def absences(self, steps: int) -> Sequence[Absence]:
        """Return what ranks missed."""
        return [one for part in self._all for one in part.absences(steps)]

    def end(self) -> None:
        """End the run."""
        for part in self._all:
            part.end()

    def tensors(self) -> ShardsByKind:
        """Return the tensors of all parts that the next step takes over."""
        return _union(part.tensors() for part in self._all)

    def weights(self) -> NamedShards:
        """Return the tensors that a file of weights may have beside parameters."""
        return _union(part.weights() for part in self._all)

    def start_from_weights(self) -> None:
        """Take over parameters that were read from a file, or that ranks begin with."""
        for part in self._all:
            part.start_from_weights()

    def position(self) -> Mapping[str, Any]:
        """Return the positions of all parts."""
        return _union(part.position() for part in self._all)

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from a position."""
        for part in self._all:
            part.resume(position)

    def checkpoint_state(self, own: ShardsByKind) -> ShardsByKind:
        """Return all that a checkpoint holds."""
        for part in self._all:
            own = part.checkpoint_state(own)
        return own

    def shared_state(self, held: NamedShards) -> NamedShards:
        """Return what ranks that hold the same must agree on."""
        for part in self._all:
            held = part.shared_state(held)
        return held

    def within(self, state: ShardsByKind, path: Path) -> ShardsByKind:
        """Return the tensors to read of the checkpoint at `path`, which may lack some."""
        for part in self._all:
            state = part.within(state, path)
        return state

    def told_position(
        self, position: Mapping[str, Any], exchange: ObjectCommunicator
    ) -> Mapping[str, Any]:
        """Return the position that a checkpoint holds."""
        for part in self._all:
            position = part.told_position(position, exchange)
        return position

    def position_of(self, told: Any) -> Any:
        """Return the position of this rank in that of a checkpoint."""
        for part in reversed(self._all):
            told = part.position_of(told)
        return told

    def take_back(self) -> None:
        """Go on from a checkpoint that lacks tensors of this rank."""
        for part in self._all:
            part.take_back()

    def exchange(self, attempt: int) -> ObjectCommunicator | None:
        """Return the ranks that write a checkpoint together; None for all of the run."""
        found = (part.exchange(attempt) for part in self._all)
        return next((one for one in found if one is not None), None)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the tensors of all parts that grow with the model."""
        return _union(part.held() for part in self._all)

    def proven(self) -> ShardsByKind:
        """Return the values of all parts that a proof compares."""
        return _union(part.proven() for part in self._all)


def step_parts(place: StepPlace, *own: StepPart) -> StepParts:
    """Return the parts of a rank: the engine's `own`, then those of the modes of its plan."""
    built = [load_reference(record.part)(place) for record in STEP_PARTS.values() if record.part]
    return StepParts([*own, *(part for part in built if part is not None)])


def _union(of_parts: Iterable[Mapping[str, V]]) -> dict[str, V]:
    """Entries of all parts. No key may be in two of them: a checkpoint would lose one's values."""
    union: dict[str, V] = {}
    for entries in of_parts:
        shared = sorted(union.keys() & entries.keys())
        assert not shared, f"two step parts have the keys {shared}"
        union |= entries
    return union


@contextmanager
def _inside(parts: Sequence[StepPart]) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.running())
        yield
