"""A set: what one fetch names, in one buffer, from its first byte read to its last one written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from echelon.core.offload_file import whole_pages

Phase = Literal["queued", "reading", "ready", "writing", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Say where a key rests in the file: at `start`, in whole pages."""

    key: str
    start: int
    numel: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Return the bytes in the file, and in a buffer."""
        return whole_pages(self.num_bytes)


class Keeper(Protocol):
    """Whoever gives sets their buffers."""

    def wait_for(self, found: FetchedSet) -> list[torch.Tensor]:
        """Return the tensors of a set once they are there."""
        ...

    def release(self, found: FetchedSet) -> None:
        """Take back the buffer of a set that was only read."""
        ...


class FetchedSet:
    """What one fetch named: on its way, with the caller, or on its way back."""

    __slots__ = ("_keeper", "_tensors", "buffer", "dropped", "left", "phase", "places", "read")

    def __init__(self, keeper: Keeper, places: Sequence[Place], *, read: bool) -> None:
        """Queue for a buffer; `read` says whether the content is wanted."""
        self._keeper, self.places, self.read = keeper, places, read
        self.phase: Phase = "queued"
        self.buffer: torch.Tensor | None = None
        self.left, self.dropped = 0, False

    def __repr__(self) -> str:
        """Name the keys."""
        return f"the set of {', '.join(place.key for place in self.places)}"

    @property
    def size(self) -> int:
        """Return the bytes of buffer that the set needs."""
        return sum(place.span for place in self.places)

    def parts(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """Yield each place with its part of the buffer, in bytes and whole pages."""
        assert self.buffer is not None, "the set has no buffer"
        start = 0
        for place in self.places:
            yield place, self.buffer[start : start + place.span]
            start += place.span

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the buffer, in the order of the keys."""
        return [part[: place.num_bytes].view(place.dtype) for place, part in self.parts()]

    def parts_of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> list[tuple[Place, torch.Tensor]]:
        """Return the parts that keep `tensors`, which must be those of the set itself."""
        assert self.phase == "ready", f"{self} is not the caller's any more"
        parts = {place.key: (place, part) for place, part in self.parts()}
        for key, tensor in zip(keys, tensors, strict=True):
            place, part = parts[key]
            assert tensor.data_ptr() == part.data_ptr(), f"{key} is put from another key's place"
            assert tensor.dtype == place.dtype, f"{key} is put as {tensor.dtype}"
            assert tensor.shape == (place.numel,), f"{key} is put as {list(tensor.shape)}"
        return [parts[key] for key in keys]

    def arrived(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.phase not in ("queued", "reading")

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors once they are there."""
        return self._keeper.wait_for(self)

    def release(self) -> None:
        """Give the buffer back, without writing."""
        self._keeper.release(self)
