# SPDX-License-Identifier: Apache-2.0
"""A rank of several that write a folder together: the target of a launcher."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from echelon.config.files.new_file import holding
from echelon.core.errors import Interrupted
from echelon.core.rulebook.launch import RUN_INTERRUPTED
from echelon.core.serialize import from_json
from echelon.launch.context import RankContext
from echelon.launch.environment import known_node_size
from echelon.training.weights.writers.shares import Writers
from echelon.training.weights.writers.task import ExportTask, WrittenWeights, write_weights

WRITE_RANK = "echelon.training.weights.writers.ranks:write_rank"
_POLL_S = 20.0
"""Seconds for which a rank waits for another before it asks again."""


class WritersExchange:
    """Tell other ranks small things through the store of a job: with no time limit of its own.

    One rank may write for hours while another waits; whether it lives, the launcher watches.
    """

    def __init__(self, context: RankContext) -> None:
        """Begin with nothing told."""
        self.index, self.size = context.rank, context.world_size
        self._context, self._turns = context, count()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, in rank order, on every rank, once all have called."""
        turn = next(self._turns)
        keys = [f"weights/{turn}/{rank}" for rank in range(self.size)]
        self._context.store.set(keys[self.index], pickle.dumps(value).hex())
        return [pickle.loads(bytes.fromhex(self._wait(key).decode("ascii"))) for key in keys]

    def _wait(self, key: str) -> bytes:
        store = self._context.store
        with self._context.progress.waits_for("other ranks that write"):
            while True:
                try:
                    store.wait([key], timedelta(seconds=_POLL_S))
                except RuntimeError as error:
                    if "imeout" not in str(error):
                        raise
                else:
                    return store.get(key)


def write_rank(context: RankContext, argument: Mapping[str, Any]) -> WrittenWeights:
    """Write this rank's share of a folder that is there."""
    task = from_json(ExportTask, argument)
    with holding(Path(task.folder)):
        return write_weights(task, writers_of(context, task.threads))


def writers_of(context: RankContext, threads: int | None) -> Writers:
    """Return the ranks of a job as writers, which move with each tensor and stop when asked to."""
    progress = context.progress

    def begin() -> None:
        if context.stop_requested():
            raise Interrupted(
                RUN_INTERRUPTED.problem("interrupted before all weights were written; none is left")
            )
        progress.mark(progress.doing)

    return Writers(
        threads,
        WritersExchange(context),
        progress.mark,
        begin=begin,
        ranks_here=known_node_size() or context.world_size,
    )
