"""Each way out of a run and each way in, as calls whose memory is measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from echelon.api.exporting import export_weights
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import base_shape, parameters
from echelon.parallel.storage.weights import Shard
from echelon.telemetry.run_directory import run_of
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_moments, load_weights
from echelon.training.weights.stored import DTYPE_SIZES
from tests.training.weights.memory.folders import LORA, make_run, write_zero
from tests.training.weights.memory.measure import Taken, in_fork, taken_by

Keywords = Mapping[str, Any]

ALLOWED_BYTES = 50_000_000
"""Beside the slice of a rank and the largest tensor."""
OUT: Mapping[str, Keywords] = {
    "hf": {"to": "hf", "dtype": "fp32", "file_bytes": 100_000_000},
    "hf, bf16": {"to": "hf", "dtype": "bf16"},
    "hf, adapters merged": {"to": "hf", "dtype": "bf16"},
    "echelon": {"to": "echelon", "dtype": "fp32", "file_bytes": 100_000_000},
    "dcp": {"to": "dcp", "dtype": "fp32"},
    "deepspeed": {"to": "deepspeed"},
    "megatron": {"to": "megatron", "dtype": "fp32"},
    "megatron-legacy": {"to": "megatron-legacy", "dtype": "fp32"},
    "megatron-legacy, tp 2": {"to": "megatron-legacy", "dtype": "fp32", "tp": 2},
}
"""What `export_weights` is asked for, by what a table calls it."""
ZERO = ("ZeRO 1", "ZeRO 3")
"""Folders that are read and not written."""
WAYS = (*OUT, *ZERO)
SLICES: Mapping[str, tuple[int, int]] = {"all": (1, 0), "a quarter": (4, 0), "columns": (4, 1)}
"""What a rank holds of each tensor: one part of so many along a dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Say what a way took."""

    way: str
    """Out or in, and of whose folder."""
    total: int
    """Bytes of all tensors that are written or read from."""
    held: int
    """Bytes that the caller asked for: the slice of a rank; 0 of what leaves."""
    largest: int
    """Bytes of the largest tensor of the folder."""
    taken: Taken
    """What was taken beyond what the process had."""

    @property
    def over(self) -> int:
        """Return the bytes beyond slice and largest tensor; below 0 where not all of it was."""
        return self.taken.own - self.held - self.largest


def measured(
    home: Path,
    size: str,
    threads: int | None = None,
    ways: Sequence[str] = WAYS,
    slices: Sequence[str] = tuple(SLICES),
) -> Iterator[Line]:
    """Yield what ways take for a model of a size; folders are made in `home` and removed.

    All of them are gone with a small model before: what is imported by then, and by a first call,
    is part of the process.
    """
    for name in ("warm", size):
        home_of_size = home / name
        home_of_size.mkdir()
        folders = _Folders(home=home_of_size, size=name, threads=threads)
        for way in ways:
            lines = _lines(folders, way, slices, measure=name == size)
            yield from [line for line in lines if line is not None]
        shutil.rmtree(home_of_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folders:
    """Make what is read: runs, once each, and what leaves them."""

    home: Path
    size: str
    threads: int | None

    def run(self, way: str) -> Path:
        """Return a run; where adapters are merged, one that trained some."""
        name = f"{self.size}{LORA}" if "adapters" in way else self.size
        if not (self.home / name).is_dir():
            in_fork(partial(make_run, self.home, name))
        return self.home / name

    def export(self, way: str, out: Path) -> None:
        """Write the folder of a way."""
        export_weights(self.run(way), out, **{**OUT[way], "threads": self.threads})

    def zero(self, way: str, out: Path) -> None:
        """Write a folder as DeepSpeed does, from one of Hugging Face."""
        self.export("hf", self.home / "hf-of-zero")
        write_zero(out, self.home / "hf-of-zero", stage=int(way[-1]), ranks=2)
        shutil.rmtree(self.home / "hf-of-zero")


def _lines(
    folders: _Folders, way: str, slices: Sequence[str], *, measure: bool
) -> Iterator[Line | None]:
    """Go out by a way and come in by it; yield None for each where nothing is measured."""
    shape = base_shape(run_of(folders.run(way)).plan().model)
    folder = folders.home / way.replace(" ", "")
    if way in ZERO:
        in_fork(partial(folders.zero, way, folder))
    elif measure:
        taken = taken_by(lambda: partial(folders.export, way, folder))
        total, largest = sizes_of(folder, shape)
        yield Line(way=f"to {way}", total=total, held=0, largest=largest, taken=taken)
    else:
        folders.export(way, folder)
    for name in slices:
        if measure:
            yield _in(f"from {way}, {name}", folder, shape, SLICES[name])
        else:
            _loading(folder, shape, SLICES[name])()
    shutil.rmtree(folder)


def sizes_of(folder: Path, shape: ModelShape) -> tuple[int, int]:
    """Return the bytes of all tensors of a folder together and of the largest one.

    Tensors are counted as the folder has them, where several parameters may be one.
    """
    found = find_weights(folder, shape)
    sizes: dict[str, int] = {}
    for places in (found.sources, *found.moments.values()):
        for stored, source in places.values():
            item = DTYPE_SIZES[stored.dtype]
            sizes[f"{id(places)}/{source.key}"] = stored.num_bytes // item * item
    return sum(sizes.values()), max(sizes.values())


def _in(way: str, folder: Path, shape: ModelShape, cut: tuple[int, int]) -> Line:
    taken = taken_by(lambda: _loading(folder, shape, cut))
    total, largest = sizes_of(folder, shape)
    every = [shards for named in _wanted(folder, shape, cut).values() for shards in named.values()]
    held = sum(shard.tensor.nbytes for shards in every for shard in shards)
    return Line(way=way, total=total, held=held, largest=largest, taken=taken)


def _loading(folder: Path, shape: ModelShape, cut: tuple[int, int]) -> Callable[[], object]:
    """Return what a run does at its start: find the weights, and fill the shards of a rank."""
    wanted = _wanted(folder, shape, cut)

    def load() -> None:
        found = find_weights(folder, shape)
        load_weights(found, wanted["weights"], SingleRankCommunicator())
        moments = {kind: named for kind, named in wanted.items() if kind != "weights"}
        load_moments(found, moments, SingleRankCommunicator())

    return load


def _wanted(
    folder: Path, shape: ModelShape, of_rank: tuple[int, int]
) -> dict[str, dict[str, list[Shard]]]:
    """Return the shards of the last rank of so many, without values: they take no memory yet."""
    parts, dim = of_rank
    kinds = ("weights", *find_weights(folder, shape).moments)
    found: dict[str, dict[str, list[Shard]]] = {kind: {} for kind in kinds}
    for spec in parameters(shape):
        cut = min(dim, len(spec.shape) - 1)
        part = max(1, spec.shape[cut] // parts)
        size = tuple(part if one == cut else n for one, n in enumerate(spec.shape))
        offset = tuple(whole - here for whole, here in zip(spec.shape, size, strict=True))
        for named in found.values():
            shard = Shard(
                name=spec.name,
                global_shape=spec.shape,
                offset=offset,
                tensor=torch.empty(size),
                primary=True,
            )
            named[spec.name] = [shard]
    return found
