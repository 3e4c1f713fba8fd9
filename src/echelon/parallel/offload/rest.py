"""The interface of a place where named flat tensors rest, and the simplest one: the device.

Who computes fetches a few keys at a time (all that one bucket's update reads), changes what it gets
in place, and puts it back; it fetches the next set before it computes on this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from echelon.cost.terms import Pool


class Fetched(Protocol):
    """A set of tensors on its way to where the caller computes."""

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors, in the order of the keys; raises what went wrong on the way."""
        ...

    def arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        ...

    def release(self) -> None:
        """Say that the caller needs the tensors no more and changed nothing; twice is fine."""
        ...


class Rest(Protocol):
    """A place where named flat tensors rest between uses."""

    @property
    def pool(self) -> Pool:
        """Return what kind of place this is."""
        ...

    def add(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Reserve room for a new key, filled with zeros.

        EnvironmentProblem where the place has no room, so a run fails before it trains.
        """
        ...

    def view(self, key: str) -> torch.Tensor:
        """Return the whole content of a key, to be read and written in place, where it rests.

        For saving, loading and proving, between steps: what was put is waited for, and nothing may
        be fetched ahead while a view is written to.
        """
        ...

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> Fetched:
        """Start to bring keys to where the caller computes; each set ends in a put or a release.

        With `read` False the content of the tensors is arbitrary: the caller writes all of it.
        """
        ...

    def put(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Start to write tensors back; the caller must not touch them again.

        They are those that one fetch gave, changed in place. Any other tensors of the right size
        and dtype are copied before this returns. Of a fetched set of which only some keys are put,
        the others are released.
        """
        ...

    def flush(self) -> None:
        """Return when everything that was put is there; raises what went wrong."""
        ...

    def close(self) -> None:
        """Free buffers and files without writing what is under way; twice is fine."""
        ...

    def held_bytes(self) -> int:
        """Return the bytes that rest here."""
        ...

    def live_bytes(self) -> Mapping[Pool, int]:
        """Return what is taken now, as measured: storages (buffers too) and sizes of files."""
        ...


class AtHand:
    """A set of tensors that needs no bringing."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Hold the resting tensors themselves."""
        self._tensors = tensors

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return self._tensors

    def arrived(self) -> bool:
        """Return True."""
        return True

    def release(self) -> None:
        """Do nothing: no buffer is held."""


class MemoryRest:
    """Rest in memory where the caller computes: fetch gives the tensors themselves."""

    def __init__(self, device: torch.device, pool: Pool) -> None:
        """Rest in the memory of `device`, accounted as `pool`."""
        self.device = device
        self.pool: Pool = pool
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, key: str, numel: int, dtype: torch.dtype) -> None:
        """Reserve zeros for a new key."""
        assert key not in self._tensors, f"{key} rests here already"
        self._tensors[key] = self.allocate(numel, dtype)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in the memory of this place."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def view(self, key: str) -> torch.Tensor:
        """Return the resting tensor."""
        return self._tensors[key]

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> Fetched:
        """Return the resting tensors, which are where the caller computes."""
        return AtHand([self._tensors[key] for key in keys])

    def put(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors that are not the resting ones; those were changed in place."""
        for key, tensor in zip(keys, tensors, strict=True):
            resting = self._tensors[key]
            check_fits(key, resting, tensor)
            if tensor.data_ptr() != resting.data_ptr():
                resting.copy_(tensor)

    def put_after(
        self,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        complete: Callable[[], object],
    ) -> None:
        """Do what `put` does; the resting tensors may be given before they are complete."""
        if any(tensor is not self._tensors[key] for key, tensor in zip(keys, tensors, strict=True)):
            complete()
        self.put(keys, tensors)

    def flush(self) -> None:
        """Do nothing: everything is in place."""

    def close(self) -> None:
        """Drop the tensors."""
        self._tensors.clear()

    def held_bytes(self) -> int:
        """Return the bytes of the storages that rest here."""
        return storage_bytes(self._tensors.values())

    def live_bytes(self) -> Mapping[Pool, int]:
        """Return what rests here, in this place's pool."""
        return {self.pool: self.held_bytes()}


class DeviceRest(MemoryRest):
    """Rest on the device that computes."""

    def __init__(self, device: torch.device) -> None:
        """Rest in the memory of `device`."""
        super().__init__(device, "device")


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
