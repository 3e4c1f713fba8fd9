"""A rank of a run in which something takes longer than it must: what ranks of a pool are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from echelon.launch.context import RankContext
from echelon.parallel import tensor
from echelon.parallel.transport import collectives
from echelon.training import loop
from echelon.training.loop import TrainSummary, train_rank
from echelon.training.optimizer import SliceOptimizer


class SlowWork:
    """A sum whose link is slow: its wait takes so much longer."""

    def __init__(self, work: Any, seconds: float) -> None:
        """Hold the work of torch."""
        self._work, self._seconds = work, seconds

    def is_completed(self) -> bool:
        """Return that it goes on."""
        return False

    def wait(self) -> None:
        """Wait longer."""
        time.sleep(self._seconds)
        self._work.wait()


def _slow(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **kwargs)

    return run


def _slow_sum(seconds: float) -> Callable[..., Any]:
    call = dist.all_reduce

    def run(*args: Any, **kwargs: Any) -> Any:
        return SlowWork(call(*args, **kwargs), seconds)

    return run


@contextmanager
def planted(where: str, seconds: float) -> Iterator[None]:
    """Let the data loader, each sum, the update or each product take `seconds` longer."""
    places: Mapping[str, tuple[Any, str, Callable[..., Any]]] = {
        "data": (loop, "training_batch", _slow(loop.training_batch, seconds)),
        "sum": (collectives.dist, "all_reduce", _slow_sum(seconds)),
        "update": (SliceOptimizer, "update", _slow(SliceOptimizer.update, seconds)),
        "product": (tensor, "matmul", _slow(tensor.matmul, seconds)),
    }
    place, name, slow = places[where]
    with patch.object(place, name, slow):
        yield


def train_with_a_sleep(context: RankContext, argument: dict[str, Any]) -> TrainSummary | None:
    """Train one rank; on the ranks that are named, something sleeps."""
    if context.rank not in argument["ranks"]:
        return train_rank(context, argument["task"])
    with planted(argument["where"], argument["seconds"]):
        return train_rank(context, argument["task"])
