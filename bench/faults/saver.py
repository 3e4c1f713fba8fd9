"""A run that does nothing but save: ranks as processes, tensors whose value is their step.

`saves.py` and the tests kill it; what it committed must load with the value of its step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Mathematics
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator, SingleRankCommunicator
from echelon.training.checkpoint.folder import clean_leftovers, find_latest, list_checkpoints
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.checkpoint.save import Snapshot, save_checkpoint

KINDS = ("parameters", "optimizer.exp_avg", "optimizer.exp_avg_sq")
KEEP = 2


class PipeCommunicator:
    """Ranks as processes that talk through rank 0."""

    def __init__(self, rank: int, world_size: int, pipes: Sequence[Connection]) -> None:
        """Hold rank 0's pipes to all others, or another rank's one pipe to rank 0."""
        self.index, self.size, self._pipes = rank, world_size, pipes

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, in rank order."""
        if self.index:
            self._pipes[0].send(value)
            return self._pipes[0].recv()
        values = [value, *(pipe.recv() for pipe in self._pipes)]
        for pipe in self._pipes:
            pipe.send(values)
        return values


def identity() -> RunIdentity:
    """Return whose checkpoints these are: a small decoder's."""
    shape = ModelShape(
        name="small",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=4,
        head_dim=16,
        ffn=128,
        vocab=512,
        max_positions=64,
    )
    mathematics = Mathematics(model=shape, global_sequences=4, sequence_length=64)
    return RunIdentity(mathematics=mathematics, plan_hash="plan", tokenizer_hash="bytes")


def make_shards(step: int, rank: int, world_size: int) -> dict[str, dict[str, list[Shard]]]:
    """Return this rank's rows of every tensor, with values that tell step, kind and place."""
    shards: dict[str, dict[str, list[Shard]]] = {}
    for number, kind in enumerate(KINDS):
        for spec in parameters(identity().mathematics.model):
            first, last = (spec.shape[0] * r // world_size for r in (rank, rank + 1))
            whole = torch.arange(spec.numel, dtype=torch.float32).reshape(spec.shape)
            mine = whole[first:last] + step + number / 8
            offset = (first,) + (0,) * (len(spec.shape) - 1)
            shard = Shard(
                name=spec.name, global_shape=spec.shape, offset=offset, tensor=mine, primary=True
            )
            shards.setdefault(kind, {})[spec.name] = [shard]
    return shards


def check_values(run_dir: Path) -> int:
    """Return the step of the newest checkpoint once its tensors are, bit for bit, of that step."""
    newest = find_latest(run_dir)
    wanted = make_shards(0, 0, 1)
    load_checkpoint(
        newest.path, wanted=wanted, identity=identity(), exchange=SingleRankCommunicator()
    )
    for kind, tensors in make_shards(newest.step, 0, 1).items():
        for name, (shard,) in tensors.items():
            if not torch.equal(shard.tensor, wanted[kind][name][0].tensor):
                raise ValueError(f"{newest.path}: {kind}/{name} is not of step {newest.step}")
    return newest.step


def save_forever(run_dir: Path, rank: int, world_size: int, pipes: Sequence[Connection]) -> None:
    """Resume from the newest checkpoint, if there is one, and save until another rank is gone."""
    torch.set_num_threads(1)
    with suppress(EOFError, ConnectionError):
        _save_forever(run_dir, PipeCommunicator(rank, world_size, pipes))


def _save_forever(run_dir: Path, exchange: ObjectCommunicator) -> None:
    rank, world_size = exchange.index, exchange.size
    directory = run_dir / "checkpoints"
    if rank == 0:
        clean_leftovers(directory)
    start = max([c.step for c in list_checkpoints(directory)], default=0)
    exchange.gather_objects(None)
    if start:
        wanted = make_shards(0, rank, world_size)
        path = find_latest(run_dir).path
        load_checkpoint(path, wanted=wanted, identity=identity(), exchange=exchange)
    for step in itertools.count(start + 1):
        snapshot = Snapshot(step=step, state={}, shards=make_shards(step, rank, world_size))
        save_checkpoint(directory, snapshot, identity=identity(), exchange=exchange, keep=KEEP)


def start_savers(context: ForkServerContext, run_dir: Path, world_size: int) -> list[BaseProcess]:
    """Start the ranks of a run that saves forever."""
    pairs = [context.Pipe() for _ in range(world_size - 1)]
    ends: list[Sequence[Connection]] = [[a for a, _ in pairs], *([b] for _, b in pairs)]
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        process = context.Process(
            target=save_forever, args=(run_dir, rank, world_size, ends[rank]), daemon=True
        )
        process.start()
        processes.append(process)
    for connection in itertools.chain.from_iterable(pairs):
        connection.close()
    return processes
