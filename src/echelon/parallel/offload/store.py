# SPDX-License-Identifier: Apache-2.0
"""A place where named flat tensors rest, the simplest one: memory where the caller computes.

Who computes fetches a few keys at a time (all that one bucket's update reads), changes what it gets
in place, and puts it back; it fetches the next set before it computes on this one. Files and
devices with a host side (`file_store.py`, `copying_store.py`) have the same methods, and keep the
promises that are told here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.plan import OffloadTarget
from echelon.cost.bytes.terms import Pool
from echelon.parallel.offload.host_memory import Allocate, plain_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlace:
    """Where slices of a rank rest, and how they come and go."""

    target: OffloadTarget
    """Device ("none"), host or files."""
    folder: Path
    """Folder of the file."""
    rank: int
    """Rank whose file it is."""
    num_buffers: int
    """Fetched sets that are in memory at once, if there are buffers."""
    chunk_bytes: int = TRAINING_PIECES.file_bytes
    """Largest transfer from and to a file."""


class ImmediateFetch:
    """A set of tensors on its way to where the caller computes: these are there already."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors, in the order of the keys; raises what went wrong on the way."""
        return self._tensors

    def arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        return True

    def release(self) -> None:
        """Say that the caller needs the tensors no more and changed nothing; twice is fine."""


class MemoryOffloadStore:
    """Rest in memory where the caller computes: fetch gives the tensors themselves.

    Without a GPU that the host has a pool of its own matters for the accounts only.
    """

    def __init__(self, pool: Pool = "host", allocate: Allocate = plain_memory) -> None:
        """Rest in what `allocate` returns, accounted as `pool`."""
        self.pool: Pool = pool
        self._allocate = allocate
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Reserve room for a new key, filled with zeros.

        EnvironmentProblem where the place has no room, so a run fails before it trains.
        """
        assert key not in self._tensors, f"{key} rests here already"
        self._tensors[key] = self._allocate(numel * dtype.itemsize).view(dtype)

    def view(self, key: str) -> torch.Tensor:
        """Return the whole content of a key, to be read and written in place, where it rests.

        For saving, loading and proving, between steps: what was put is waited for, and nothing may
        be fetched ahead while a view is written to.
        """
        return self._tensors[key]

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> ImmediateFetch:
        """Start to bring keys to where the caller computes; each set ends in a put or a release.

        With `read` False the content of the tensors is arbitrary: the caller writes all of it.
        """
        return ImmediateFetch([self._tensors[key] for key in keys])

    def put(
        self,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        complete: Callable[[], object] | None = None,
    ) -> None:
        """Start to write tensors back; the caller must not touch them again.

        They are those that one fetch gave, changed in place. Any other tensors of the right size
        and dtype are copied before this returns. Of a fetched set of which only some keys are put,
        the others are released. Their content is there when `complete` returns, where it is given.
        """
        resting = [self._tensors[key] for key in keys]
        if complete is not None and any(a is not b for a, b in zip(tensors, resting, strict=True)):
            complete()
        copy_into(keys, resting, tensors)

    def flush(self) -> None:
        """Return when everything that was put is there; raises what went wrong."""

    def close(self) -> None:
        """Free buffers and files without writing what is under way; twice is fine."""
        self._tensors.clear()

    def held_bytes(self) -> int:
        """Return the bytes that rest here."""
        return storage_bytes(self._tensors.values())

    def live_bytes(self) -> Mapping[Pool, int]:
        """Return what is taken now, as measured: storages (buffers too) and sizes of files."""
        return {self.pool: self.held_bytes()}


def copy_into(
    keys: Iterable[str], rooms: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]
) -> None:
    """Copy tensors into the rooms of their keys, but for those that are there already."""
    for key, room, tensor in zip(keys, rooms, tensors, strict=True):
        check_fits(key, room, tensor)
        if tensor.data_ptr() != room.data_ptr():
            room.copy_(tensor)


def check_fits(key: str, resting: torch.Tensor, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not what rests under `key`: a bug of the caller."""
    assert tensor.dtype == resting.dtype, f"{key} is {resting.dtype}, not {tensor.dtype}"
    assert tensor.shape == resting.shape, f"{key} is {resting.shape}, not {tensor.shape}"


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())
