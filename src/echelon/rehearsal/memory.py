# SPDX-License-Identifier: Apache-2.0
"""What lives in the memory of a rank, storage by storage, and what each is for.

Every storage that an operation makes is counted from its making to its end, with no rounding: what
an allocator adds, NCCL's buffers and the context of CUDA are terms of the plan, not of this.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from echelon.parallel.tensor_memory import BufferPool

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, BUFFERS = "gathered", "buffers"
ACTIVATIONS, MESSAGES = "activations", "messages"
HOST = "host"
"""What is in the memory of the host, or in files: it is not counted."""
OTHER = "other"
"""What a step reads (its tokens), and what lives between steps and is none of the others."""

Released = Callable[[int], None]
"""Told the storage whose memory is given back while views of it live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Say what lived when an action had ended, by term, and the most of all while it ran."""

    action: str
    kept: Mapping[str, int]
    peak_bytes: int


class MemoryMeter:
    """Count what lives, by term; what is made now is for `term`."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.term = OTHER
        self.points: list[MemoryPoint] = []
        self.at_peak: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self._living: dict[int, tuple[int, str, object]] = {}  # bytes, term, what tells of the end
        self._by_term: Counter[str] = Counter()
        self._bytes = self._peak = self._action_peak = 0

    @property
    def peak_bytes(self) -> int:
        """Return the most that lived at one time since the peak was last forgotten."""
        return self._peak

    def made(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            num_bytes, term = storage.nbytes(), self.term
            end = weakref.ref(storage, lambda _: self._end(key))
            self._living[key] = (num_bytes, term, end)
            self._add(term, num_bytes)

    def is_for(self, term: str, tensors: Sequence[torch.Tensor]) -> None:
        """Say what the storages of tensors are for."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._living:
                num_bytes, before, end = self._living[key]
                self._add(before, -num_bytes)
                self._add(term, num_bytes)
                self._living[key] = (num_bytes, term, end)

    def given_back(self, tensor: torch.Tensor) -> None:
        """Learn that the memory of a tensor may be used again, whatever still points to it."""
        key = tensor.untyped_storage()._cdata
        num_bytes, term, end = self._living[key]
        self._add(term, -num_bytes)
        self._living[key] = (0, term, end)

    def forget_peak(self) -> None:
        """Look for peaks from now on."""
        self.points.clear()
        self._peak = self._action_peak = self._bytes
        self.at_peak, self.most = dict(self._by_term), dict(self._by_term)

    def action_ended(self, action: str) -> None:
        """Write down what an action has left."""
        point = MemoryPoint(action=action, kept=self.now(), peak_bytes=self._action_peak)
        self.points.append(point)
        self._action_peak = self._bytes

    def now(self) -> dict[str, int]:
        """Return what lives, by term."""
        return {term: count for term, count in self._by_term.items() if count}

    @contextmanager
    def within(self, term: str) -> Iterator[None]:
        """Count what is made inside as `term`."""
        before, self.term = self.term, term
        try:
            yield
        finally:
            self.term = before

    def _add(self, term: str, num_bytes: int) -> None:
        if term == HOST:
            return
        now = self._by_term[term] = self._by_term[term] + num_bytes
        self._bytes = total = self._bytes + num_bytes
        if num_bytes <= 0:
            return
        if now > self.most.get(term, 0):
            self.most[term] = now
        self._action_peak = max(self._action_peak, total)
        if total > self._peak:
            self._peak = total
            self.at_peak = dict(self._by_term)

    def _end(self, key: int) -> None:
        num_bytes, term, _ = self._living.pop(key)
        self._add(term, -num_bytes)


class MeteredPool(BufferPool):
    """Lend memory to buckets that are not always whole; of a GPU its allocator does so."""

    def __init__(self, device: torch.device, meter: MemoryMeter, released: Released) -> None:
        """Tell `meter` of what is lent and given back, and `released` of the latter."""
        super().__init__(device)
        self._meter, self._released = meter, released

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return new memory: two that are lent at the same time are two."""
        piece = super().take(num_bytes)
        self._meter.made(piece)
        return piece

    def give_back(self, piece: torch.Tensor) -> None:
        """Take memory back; it is never lent again, so that each loan is a storage of its own."""
        self._released(piece.untyped_storage()._cdata)
        self._meter.given_back(piece)
