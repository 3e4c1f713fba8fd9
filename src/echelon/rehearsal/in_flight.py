# SPDX-License-Identifier: Apache-2.0
"""Memory that a collective may still read or write: who touches it before the wait is at fault.

On NCCL a collective runs beside the computation, on a stream of its own, from its issue to the
wait. Until then what it writes may be neither read nor written, what it reads not written, and no
memory of it may be given back. Where a part of a tensor is given to it, only that part is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

MISSING_WAIT, RELEASED_IN_FLIGHT = "missing-wait", "released-in-flight"
NEVER_AWAITED = "never-awaited"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Region:
    """Bytes of a storage that an operation has been given."""

    begin: int
    end: int
    written: bool
    issue: int
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Misuse:
    """Say that memory in flight was touched: the rule, by what, and where in the code."""

    rule: str
    """MISSING_WAIT, RELEASED_IN_FLIGHT or NEVER_AWAITED."""
    text: str


class MemoryInFlight:
    """Know what is under way on one rank."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.misuses: list[Misuse] = []
        self._regions: dict[int, list[_Region]] = {}
        self._of_issue: dict[int, list[int]] = {}
        self._told: set[str] = set()

    def begin(
        self, issue: int, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Learn that operation `issue` has been given tensors; they live until it is awaited."""
        for tensors, written in ((reads, False), (writes, True)):
            for tensor in tensors:
                begin, end = _extent(tensor)
                key = tensor.untyped_storage()._cdata
                region = _Region(
                    begin=begin,
                    end=end,
                    written=written,
                    issue=issue,
                    name=name,
                    tensor=tensor.detach(),
                )
                self._regions.setdefault(key, []).append(region)
                self._of_issue.setdefault(issue, []).append(key)

    def end(self, issue: int) -> None:
        """Learn that an operation was awaited."""
        for key in self._of_issue.pop(issue, ()):
            left = [one for one in self._regions.get(key, ()) if one.issue != issue]
            if left:
                self._regions[key] = left
            else:
                self._regions.pop(key, None)

    def held_of(self, tensors: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return those tensors of whose storage something is under way."""
        regions = self._regions
        if not regions:
            return ()
        return [one for one in tensors if one.untyped_storage()._cdata in regions]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether something of the storage of a tensor is under way."""
        return tensor.untyped_storage()._cdata in self._regions

    def touched(self, tensor: torch.Tensor, *, write: bool, by: str, where: str) -> None:
        """Learn that the computation reads or writes a tensor."""
        regions = self._regions.get(tensor.untyped_storage()._cdata, ())
        begin, end = _extent(tensor)
        for region in regions:
            if (region.written or write) and begin < region.end and region.begin < end:
                does = "writes" if write else "reads"
                self._tell(MISSING_WAIT, f"{by} at {where} {does} {region.name} before its wait")

    def released(self, key: int) -> None:
        """Learn that the memory of a storage is given back while its tensors live."""
        for region in self._regions.get(key, ()):
            self._tell(RELEASED_IN_FLIGHT, f"the memory of {region.name} is released in flight")

    def step_ended(self) -> None:
        """Tell of what nobody has awaited.

        Only parameters that are gathered may be under way, and sums of outer gradients that come
        late.
        """
        for regions in self._regions.values():
            for region in regions:
                if not region.name.startswith(("parameters.", "outer gradients.")):
                    self._tell(NEVER_AWAITED, f"nobody has awaited {region.name}")

    def _tell(self, rule: str, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.misuses.append(Misuse(rule=rule, text=text))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    begin = int(tensor.storage_offset())
    last = begin + sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin * size, (last + 1) * size
