# SPDX-License-Identifier: Apache-2.0
"""A set: what one fetch names, in one buffer, from its first byte read to its last one written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from echelon.core.offload_file import round_up_to_pages

FetchPhase = Literal["queued", "reading", "ready", "writing", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileExtent:
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
    def span_bytes(self) -> int:
        """Return the bytes in the file, and in a buffer."""
        return round_up_to_pages(self.num_bytes)


class FileFetch:
    """What one fetch named: on its way, with the caller, or on its way back."""

    __slots__ = ("_release", "_wait", "buffer", "dropped", "extents", "left", "phase", "read")

    def __init__(
        self,
        places: Sequence[FileExtent],
        *,
        read: bool,
        wait_for: Callable[[FileFetch], list[torch.Tensor]],
        release: Callable[[FileFetch], None],
    ) -> None:
        """Queue for a buffer; `read` says whether the content is wanted.

        Whoever gives it one can `wait_for` its tensors, and takes a buffer back by `release`.
        """
        self._wait, self._release = wait_for, release
        self.extents, self.read = places, read
        self.phase: FetchPhase = "queued"
        self.buffer: torch.Tensor | None = None
        self.left, self.dropped = 0, False

    def __repr__(self) -> str:
        """Name the keys."""
        return f"the set of {', '.join(place.key for place in self.extents)}"

    @property
    def size(self) -> int:
        """Return the bytes of buffer that the set needs."""
        return sum(place.span_bytes for place in self.extents)

    def parts(self) -> Iterator[tuple[FileExtent, torch.Tensor]]:
        """Yield each place with its part of the buffer, in bytes and whole pages."""
        assert self.buffer is not None, "the set has no buffer"
        start = 0
        for place in self.extents:
            yield place, self.buffer[start : start + place.span_bytes]
            start += place.span_bytes

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the buffer, in the order of the keys."""
        return [part[: place.num_bytes].view(place.dtype) for place, part in self.parts()]

    def parts_of(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> list[tuple[FileExtent, torch.Tensor]]:
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
        return self._wait(self)

    def release(self) -> None:
        """Give the buffer back, without writing."""
        self._release(self)
