"""Ranks as threads, and a small model cut into shards in several ways."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from echelon.core.errors import EchelonError
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Mathematics
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import ObjectCommunicator, SingleRankCommunicator
from echelon.training.checkpoint.folder import Keep
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.load import LoadedCheckpoint, load_checkpoint
from echelon.training.checkpoint.save import Snapshot, save_checkpoint
from echelon.training.checkpoint.shard_file import Shards

T = TypeVar("T")
Tensors = dict[str, dict[str, torch.Tensor]]
Cut = Callable[[tuple[int, ...], int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]]

SHAPE = ModelShape(
    name="small",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn=12,
    vocab=19,
    max_positions=16,
)
MATHEMATICS = Mathematics(model=SHAPE, global_sequences=4, sequence_length=16)
IDENTITY = RunIdentity(mathematics=MATHEMATICS, plan_hash="abc", tokenizer_hash="bytes")


class ThreadCommunicator:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.index, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank gave, as copies, for so they come from other processes."""
        self._values[self.index] = pickle.dumps(value)
        self._barrier.wait()
        gathered = [pickle.loads(given) for given in self._values]
        self._barrier.wait()
        return gathered


def on_ranks(world_size: int, action: Callable[[ObjectCommunicator], T]) -> list[T]:
    """Run `action` on ranks; raise what they raised once it is seen to be the same on all."""
    values: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=30)

    def run(rank: int) -> T | EchelonError:
        try:
            return action(ThreadCommunicator(rank, values, barrier))
        except EchelonError as error:
            return error
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        results = list(pool.map(run, range(world_size)))
    errors = [result for result in results if isinstance(result, EchelonError)]
    if errors:
        assert len(errors) == world_size, "some ranks raised and others did not"
        assert {(type(error), tuple(error.problems)) for error in errors} == {
            (type(errors[0]), tuple(errors[0].problems))
        }
        raise errors[0]
    return [result for result in results if not isinstance(result, EchelonError)]


def make_tensors(seed: int = 0, shape: ModelShape = SHAPE) -> Tensors:
    """Return random tensors: parameters and one kind of optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    return {
        kind: {
            spec.name: torch.randn(spec.shape, generator=generator) for spec in parameters(shape)
        }
        for kind in ("parameters", "optimizer.exp_avg")
    }


def by_rows(shape: tuple[int, ...], rank: int, world_size: int) -> list[Any]:
    """Cut dim 0, unevenly where it does not divide."""
    first, last = (shape[0] * r // world_size for r in (rank, rank + 1))
    return [((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))]


def by_columns(shape: tuple[int, ...], rank: int, world_size: int) -> list[Any]:
    """Cut the last dim, in stripes: every rank holds two pieces."""
    pieces: list[Any] = []
    for part in (rank, 2 * world_size - 1 - rank):
        first, last = (shape[-1] * r // (2 * world_size) for r in (part, part + 1))
        pieces.append(((0,) * (len(shape) - 1) + (first,), (*shape[:-1], last - first)))
    return pieces


def whole_on(owner: int) -> Cut:
    """Leave all of it with one rank."""

    def cut(shape: tuple[int, ...], rank: int, world_size: int) -> list[Any]:
        return [((0,) * len(shape), shape)] if rank == owner % world_size else []

    return cut


def cut_shards(tensors: Tensors, cut: Cut, rank: int, world_size: int) -> Shards:
    """Return copies of the pieces that a rank holds."""
    shards: dict[str, dict[str, list[Shard]]] = {}
    for kind, by_name in tensors.items():
        for name, whole in by_name.items():
            for offset, shape in cut(tuple(whole.shape), rank, world_size):
                place = tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
                piece = Shard(
                    name=name,
                    global_shape=tuple(whole.shape),
                    offset=offset,
                    tensor=whole[place].clone(),
                    primary=True,
                )
                shards.setdefault(kind, {}).setdefault(name, []).append(piece)
    return shards


def empty_like(shards: Shards) -> Shards:
    """Return the same shards with tensors to be filled, held by a replica."""
    return {
        kind: {
            name: [
                replace(shard, tensor=torch.full_like(shard.tensor, 7), primary=False)
                for shard in pieces
            ]
            for name, pieces in by_name.items()
        }
        for kind, by_name in shards.items()
    }


def save(
    directory: Path,
    *,
    step: int = 1,
    tensors: Tensors | None = None,
    cut: Cut = by_rows,
    world_size: int = 2,
    keep: Keep = "all",
) -> Path:
    """Save tensors from ranks and return the path of the checkpoint."""
    held = make_tensors(step) if tensors is None else tensors

    def action(exchange: ObjectCommunicator) -> Path:
        shards = cut_shards(held, cut, exchange.index, world_size)
        snapshot = Snapshot(step=step, state={"tokens_seen": step * 64}, shards=shards)
        return save_checkpoint(directory, snapshot, identity=IDENTITY, exchange=exchange, keep=keep)

    return on_ranks(world_size, action)[0]


def identity_of(shape: ModelShape) -> RunIdentity:
    """Return the identity of runs of another model."""
    return replace(IDENTITY, mathematics=replace(MATHEMATICS, model=shape))


def save_whole(directory: Path, shape: ModelShape, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Save the parameters of a model from one rank; return the path of the checkpoint."""
    shards = {
        name: [
            Shard(
                name=name,
                global_shape=tuple(tensor.shape),
                offset=(0,) * tensor.dim(),
                tensor=tensor,
                primary=True,
            )
        ]
        for name, tensor in tensors.items()
    }
    snapshot = Snapshot(step=1, state={}, shards={"parameters": shards})
    return save_checkpoint(
        directory,
        snapshot,
        identity=identity_of(shape),
        exchange=SingleRankCommunicator(),
        keep="all",
    )


def load(
    path: Path,
    *,
    like: Tensors,
    cut: Cut = by_rows,
    world_size: int = 2,
    identity: RunIdentity = IDENTITY,
    accept: Sequence[str] = (),
) -> tuple[Tensors, LoadedCheckpoint]:
    """Load into ranks that hold `like` cut by `cut`; return the whole tensors they then hold."""
    whole = {
        kind: {name: torch.full_like(tensor, 7) for name, tensor in by_name.items()}
        for kind, by_name in like.items()
    }

    def action(exchange: ObjectCommunicator) -> LoadedCheckpoint:
        wanted = empty_like(cut_shards(like, cut, exchange.index, world_size))
        result = load_checkpoint(
            path, wanted=wanted, identity=identity, exchange=exchange, accept=accept
        )
        for kind, by_name in wanted.items():
            for name, pieces in by_name.items():
                for shard in pieces:
                    place = tuple(
                        slice(a, a + n)
                        for a, n in zip(shard.offset, shard.tensor.shape, strict=True)
                    )
                    whole[kind][name][place] = shard.tensor
        return result

    return whole, on_ranks(world_size, action)[0]


def assert_same(left: Tensors, right: Tensors) -> None:
    """Compare bit for bit."""
    assert left.keys() == right.keys()
    for kind, by_name in left.items():
        assert by_name.keys() == right[kind].keys()
        for name, tensor in by_name.items():
            other = right[kind][name]
            assert tensor.dtype == other.dtype
            assert tensor.numpy(force=True).tobytes() == other.numpy(force=True).tobytes(), name
