# SPDX-License-Identifier: Apache-2.0
"""The seams of a step: where a mode joins the engine, the loop, checkpoints and the proof.

A mode is one `StepPart`, and one record of `core/choices/step_parts.py` that names its builder.
The engine and the loop name no mode: they call these methods, in the order in which they stand
here, on all parts of a plan (`training/steps/parts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.rank_model import RankModel
from echelon.parallel.storage.buckets import Bucket
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator
from echelon.training.observer import Absence, StepFacts

NamedShards = dict[str, list[Shard]]
"""Pieces of tensors, by canonical name."""

ShardsByKind = Mapping[str, Mapping[str, list[Shard]]]
"""Pieces of tensors, by kind and by canonical name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(StepFacts):
    """Say what one step did; loss, tokens, grad_norm and flags are the same on every rank."""

    stop_requests: int
    """Ranks that asked to stop."""
    microbatch_losses: Mapping[tuple[int, int], tuple[float, int]]
    """(data rank, microbatch) -> (sum of losses, counted tokens) of what this rank computed, its
    positions only."""

    @property
    def finite(self) -> bool:
        """Return whether the run may go on: all is finite, or an overflow that the scale mends."""
        return isfinite(self.loss) and (self.skipped or isfinite(self.grad_norm))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Say where a part joins: one rank of a run, with the model that it trains."""

    run: Plan
    """The plan of the whole run."""
    plan: Plan
    """The plan of the ranks that take a step together."""
    model: RankModel
    """What this rank holds of the model."""
    masters: Mapping[str, torch.Tensor]
    """Master copies of the slices, by bucket; none where the optimizer updates parameters."""
    groups: RankGroups
    """The groups of this rank."""
    device: torch.device
    """Its device."""


class StepPart:
    """A mode's part of a run on one rank. Here every method does nothing."""

    num_told = 0
    """Numbers that this part tells all ranks with the sums of each step."""
    begins_together = True
    """Whether all ranks of the run are there when it begins."""

    # A step.

    def start_step(self, loss_scale: float) -> None:
        """Begin a step, the loss of which is multiplied by `loss_scale`."""

    def running(self) -> AbstractContextManager[None]:
        """Return what forward and backward of a step run in."""
        return nullcontext()

    def gradients_complete(self) -> Sequence[float]:
        """Learn that all gradients are summed; return `num_told` numbers for all ranks."""
        return (0.0,) * self.num_told

    def agreed(self, result: StepResult, rows: torch.Tensor) -> StepResult:
        """Return the result with the facts of this part; `rows` [ranks, num_told] is told."""
        del rows
        return result

    def before_update(self, step: int) -> None:
        """Begin to update, unless the step is skipped."""

    def holds_back(self, bucket: Bucket) -> bool:
        """Return whether `after_update` reads or changes a slice that was updated.

        It is sent to other ranks after that.
        """
        del bucket
        return False

    def updated(self, bucket: Bucket) -> None:
        """Learn that a slice has its new values, which are sent to other ranks now."""

    def after_update(self, step: int, *, skipped: bool) -> Sequence[Bucket]:
        """Change what follows from the update; return the buckets to send to other ranks."""
        del step, skipped
        return ()

    def end_step(self, result: StepResult) -> StepResult:
        """End a step whose result is finite; return the result as it is told."""
        return result

    def mean_loss(self, loss: float, tokens: int) -> float:
        """Return the loss of the run from the mean `loss` over `tokens` of this rank's batch."""
        del tokens
        return loss

    def settle(self) -> None:
        """Return when nothing is under way: tensors are in memory, and change no more."""

    # A run.

    def connect(self, context: RankContext, message_s: float, ends_after: int) -> None:
        """Learn where other ranks are met, and after how many steps the run ends."""

    @property
    def comes_late(self) -> bool:
        """Return whether this rank comes into a run that goes on."""
        return False

    def come_in(self) -> int | None:
        """Come into a run that goes on; return the steps that are done, None if it is over."""
        raise AssertionError("only a rank that comes late comes in")

    def begin(self, step: int) -> None:
        """Begin to take steps after `step`: weights are those of a seed, a file, a checkpoint."""

    def speaks(self, step: int) -> bool | None:
        """Return whether this rank tells of the run after `step`; None if that never changes."""
        del step
        return None

    def facts(self, result: StepResult) -> StepResult:
        """Return what an observer of the whole run is told of a step."""
        return result

    def news(self) -> Sequence[str]:
        """Return what else happened since the last time, in words."""
        return ()

    def absences(self, steps: int) -> Sequence[Absence]:
        """Return what ranks missed of a run of so many steps."""
        del steps
        return ()

    def end(self) -> None:
        """End the run: no step follows. Waits for nobody."""

    # A checkpoint.

    def tensors(self) -> ShardsByKind:
        """Return the tensors that the next step takes over, as views."""
        return {}

    def weights(self) -> NamedShards:
        """Return the tensors that a file of weights may have beside parameters, as views."""
        return {}

    def start_from_weights(self) -> None:
        """Take over parameters that were read from a file, or that ranks begin with."""

    def position(self) -> Mapping[str, Any]:
        """Return what the next step depends on beside tensors, as JSON by keys of its own."""
        return {}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from a position, which has the keys of all parts."""

    def checkpoint_state(self, own: ShardsByKind) -> ShardsByKind:
        """Return all that a checkpoint holds, `own` being what the ranks of a step hold."""
        return own

    def shared_state(self, held: NamedShards) -> NamedShards:
        """Return what ranks that hold the same must agree on, by what an error calls it."""
        return held

    def within(self, state: ShardsByKind, path: Path) -> ShardsByKind:
        """Return the tensors to read of the checkpoint at `path`, which may lack some."""
        del path
        return state

    def told_position(
        self, position: Mapping[str, Any], exchange: ObjectCommunicator
    ) -> Mapping[str, Any]:
        """Return the position that a checkpoint holds, the same on all ranks that write it."""
        del exchange
        return position

    def position_of(self, told: Any) -> Any:
        """Return the position of this rank in that of a checkpoint, or what is none."""
        return told

    def take_back(self) -> None:
        """Go on from a checkpoint that lacks tensors of this rank."""

    def exchange(self, attempt: int) -> ObjectCommunicator | None:
        """Return the ranks that write a checkpoint together; None for all of the run.

        An `attempt` that is not the first follows one that broke.
        """
        del attempt
        return None

    # A proof, and the memory that it counts.

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the tensors that grow with the model, by the term of their bytes."""
        return {}

    def proven(self) -> ShardsByKind:
        """Return the values that a proof compares with those of the reference, by kind."""
        return {}
