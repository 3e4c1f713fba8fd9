"""A worker pushes buckets in the order in which servers wait for them."""

from __future__ import annotations

from typing import Any, cast

from echelon.parallel.servers import GradientPush
from echelon.parallel.storage.buckets import Bucket


class Pushes(GradientPush):
    """A push that sends nothing, and notes the order."""

    def __init__(self) -> None:
        self._next, self._full, self._copies = 0, {}, False
        self._pushes = cast(Any, [])
        self.order: list[int] = []

    def _push(self, bucket: Bucket) -> Any:
        self.order.append(bucket.index)


class Numbered:
    """A bucket of which only the place matters."""

    def __init__(self, index: int) -> None:
        self.index = index


def test_a_bucket_that_is_full_before_its_turn_waits() -> None:
    """S06: a server posts its receives in the order of buckets."""
    pushes = Pushes()
    for index in (1, 0, 3, 2):
        pushes.bucket_is_full(cast(Any, Numbered(index)), last=True)
        if index == 1:
            assert pushes.order == []
    assert pushes.order == [0, 1, 2, 3]
