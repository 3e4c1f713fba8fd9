# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one run: what is written of it, by whom, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

from echelon.config.job import Job
from echelon.core.errors import CheckpointError
from echelon.core.parameters import parameters
from echelon.core.rulebook.run import CHECKPOINT_UNDAMAGED
from echelon.training.checkpoint.communicator import (
    ExchangeBroken,
    ObjectCommunicator,
    run_on_all_ranks,
)
from echelon.training.checkpoint.folder import checkpoint_path
from echelon.training.checkpoint.identity import RunIdentity, data_problems
from echelon.training.checkpoint.index import PARAMETERS, STATE_FILE, BaseReference, base_of
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.checkpoint.save import Snapshot, save_checkpoint
from echelon.training.engine import TrainEngine


class RunCheckpoints:
    """Write and read the checkpoints of a run, on one of its ranks."""

    def __init__(
        self, job: Job, run_dir: Path, engine: TrainEngine, identity: RunIdentity, data_hash: str
    ) -> None:
        self._job, self._engine, self._identity, self._data_hash = job, engine, identity, data_hash
        self._folder = run_dir / "checkpoints"
        self._exchange = engine.groups.everyone
        self._frozen = {spec.name for spec in parameters(job.plan.model) if spec.frozen}
        self._base: BaseReference | None = None
        self._has_saved = False

    def load(self, path: Path) -> int:
        """Fill the engine from a checkpoint, and return the steps that are done.

        A rank that is not in it has what all ranks agreed on, and an optimizer that begins anew.
        """
        engine, scope = self._engine, self._engine.parts.scope
        every = engine.checkpoint_state()
        wanted = scope.within(every, path)
        loaded = load_checkpoint(
            path,
            wanted=wanted,
            identity=self._identity,
            exchange=self._exchange,
            accept=("optimizer.total_steps",),
            pieces=engine.pieces,
        )
        self._base = base_of(path)
        data = self._job.data
        if other := list(data_problems(loaded.state, self._data_hash, data, where=str(path))):
            raise CheckpointError(other)
        position = scope.position_of(loaded.state.get("engine", {}))
        if len(wanted) < len(every):
            scope.take_back()
            position = engine.position()
        if not _has_entries(position, engine.position()):
            raise CheckpointError(
                CHECKPOINT_UNDAMAGED.problem(
                    f"{path / STATE_FILE} does not say where the optimizer stands: its entry "
                    f"'engine' needs {', '.join(engine.position())}"
                )
            )
        engine.resume(position)
        if len(wanted) < len(every):
            engine.refresh(slices=True)
        return loaded.step

    def save(self, step: int) -> Path:
        """Write a checkpoint after so many steps, and return its path.

        Where a rank that should write it is lost meanwhile, those that are left write it once more,
        unless it is written by then.
        """
        engine, scope = self._engine, self._engine.parts.scope
        engine.parts.settle()
        final = checkpoint_path(self._folder, step)
        for attempt in count():
            with suppress(ExchangeBroken):
                exchange = scope.exchange(attempt) or self._exchange
                if attempt and all(run_on_all_ranks(exchange, final.exists)):
                    return final
                position = scope.position(engine.position(), exchange)
                return self._save(step, position, engine.checkpoint_state(), exchange)
        raise AssertionError("attempts end with the run")

    def _save(
        self,
        step: int,
        position: Mapping[str, Any],
        state: Mapping[str, Any],
        exchange: ObjectCommunicator,
    ) -> Path:
        numbers = self._engine.plan
        held = state.get(PARAMETERS, {})
        frozen = {name: shards for name, shards in held.items() if name in self._frozen}
        trained = {name: shards for name, shards in held.items() if name not in frozen}
        snapshot = Snapshot(
            step=step,
            state={
                "step": step,
                "tokens_seen": step * numbers.tokens_per_step,
                "data_hash": self._data_hash,
                "epoch_end": self._job.data.epoch_end,
                "train_on": self._job.data.train_on,
                "seed": numbers.mathematics.seed,
                "engine": position,
            },
            shards={**state, PARAMETERS: trained} if self._frozen else state,
            base={PARAMETERS: frozen} if self._frozen else {},
            known_base=self._base,
        )
        saved = save_checkpoint(
            self._folder,
            snapshot,
            identity=self._identity,
            exchange=exchange,
            keep=self._job.checkpoint.keep,
        )
        if self._frozen and not self._has_saved:
            # In a folder of its own a run that goes on has written a base of its own.
            self._base, self._has_saved = base_of(saved), True
        return saved


def _has_entries(found: Any, wanted: Mapping[str, Any]) -> bool:
    """Return whether a JSON value is an object with the entries of `wanted`, of their kinds."""
    if not isinstance(found, dict):
        return False
    entries = cast("dict[str, Any]", found)
    for key, value in wanted.items():
        entry = entries.get(key)
        kind = int | float if isinstance(value, float) else type(value)
        if not isinstance(entry, kind):
            return False
        if isinstance(value, dict) and not _has_entries(entry, cast("dict[str, Any]", value)):
            return False
    return True
