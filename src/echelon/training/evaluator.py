# SPDX-License-Identifier: Apache-2.0
"""Validate the checkpoints of a run as they come, in one process beside it.

The model is whole here, whatever its layout was: one rank, plain kernels, the same mathematics and
the same validation batches. Only parameters and the routers' biases are read of a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.choices.updates import Updates
from echelon.core.event import EventSink, NoEvents
from echelon.core.mesh import Mesh
from echelon.core.plan import Layout, Pipeline, Plan
from echelon.launch.context import RankContext, RankProgress
from echelon.launch.process_group import device_of
from echelon.layout.stage import with_rounding
from echelon.training.checkpoint.folder import CHECKPOINTS, StoredCheckpoint, list_checkpoints
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import PARAMETERS
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.loop import RankTask, TrainLoop
from echelon.training.observer import StepFacts

POLL_S = 0.5
"""Seconds between two looks at the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoss:
    """Say what was found of one checkpoint."""

    step: int
    path: Path
    loss: float


class NoObserver:
    """Watch nothing: results are returned."""

    sink: EventSink = NoEvents()

    def used_bytes(self) -> int:
        return 0

    def stepped(self, facts: StepFacts) -> None: ...

    def validated(self, step: int, loss: float) -> None: ...

    def saved(self, step: int, path: Path) -> None: ...

    def noted(self, step: int, text: str) -> None: ...

    def speaks(self, now: bool) -> None: ...

    def close(self) -> None: ...


def plan_alone(plan: Plan) -> Plan:
    """Return a plan of one rank that computes the losses of `plan`, on a GPU where there is one."""
    blocks = tuple(range(plan.model.layers))
    layout = Layout(
        mesh=Mesh(),
        microbatch_sequences=plan.layout.microbatch_sequences,
        pipeline=Pipeline(stages=(blocks,)),
    )
    on_gpu = plan.cluster.backend == "nccl" and torch.cuda.is_available()
    return replace(
        plan,
        layout=with_rounding(plan, layout),
        # They say how parameters change, which they do not here.
        mathematics=replace(plan.mathematics, local_sgd=LocalSgd(), updates=Updates()),
        cluster=replace(plan.cluster, backend="nccl" if on_gpu else "gloo"),
    )


class CheckpointEvaluator:
    """Hold the model of a run in one process, and validate its checkpoints."""

    def __init__(self, task: RankTask) -> None:
        """Build the model, and open the data, of the run whose ranks are told `task`."""
        plan = plan_alone(task.job.plan)
        context = RankContext(
            rank=0,
            world_size=1,
            device=device_of(plan.cluster.backend, 0),
            store=HashStore(),
            progress=RankProgress(),
        )
        alone = replace(task, job=replace(task.job, plan=plan))
        self._loop = TrainLoop(context, alone, NoObserver())
        tokenizer = self._loop.identity.tokenizer_hash
        self._identity = RunIdentity.from_plan(task.job.plan, tokenizer)
        self._folder = Path(task.run_dir) / CHECKPOINTS

    def evaluate(self, checkpoint: StoredCheckpoint) -> CheckpointLoss:
        """Return the validation loss of a checkpoint; CheckpointError where it is not whole."""
        engine = self._loop.engine
        load_checkpoint(
            checkpoint.path,
            wanted={PARAMETERS: engine.masters(), **engine.parts.tensors()},
            identity=self._identity,
            exchange=self._loop.exchange,
        )
        engine.refresh()
        loss = self._loop.validate(checkpoint.step)
        return CheckpointLoss(step=checkpoint.step, path=checkpoint.path, loss=loss)

    def follow(self, ended: Callable[[], bool], *, after: int = -1) -> Iterator[CheckpointLoss]:
        """Yield the newest checkpoint each time there is a new one, until the run has `ended`.

        Where several came meanwhile, the older ones are passed over; the last one is not. Those up
        to the step `after` are none of this run.
        """
        last = after
        while True:
            over = ended()  # asked first: what was saved before is still looked at
            found = [one for one in list_checkpoints(self._folder) if one.step > last]
            if found:
                try:
                    yield self.evaluate(found[-1])
                except Exception:
                    if found[-1].path.exists():
                        raise
                    # It has been removed for newer ones while it was read.
                last = found[-1].step
            elif over:
                return
            else:
                time.sleep(POLL_S)

    def close(self) -> None:
        """Give back what rests outside of the device."""
        self._loop.engine.close()
