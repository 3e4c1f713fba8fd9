"""The order of an update: which bucket when, and what is fetched ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.layout.buckets import BucketPlan
from echelon.parallel.offload.host_memory import device_memory
from echelon.parallel.offload.store import ImmediateFetch, MemoryOffloadStore
from echelon.parallel.storage.buckets import Bucket
from echelon.training.optimizer.step import (
    StoredTensorRequest,
    UpdateTask,
    run_update_tasks,
    update_order,
)
from tests.parallel.buckets import by_hand, matrix

CPU = torch.device("cpu")


def plans(updates: str) -> list[Bucket]:
    """Return buckets in the order of backward, updated by muon ("m") or adamw ("a")."""
    found: list[Bucket] = []
    for index, letter in enumerate(updates):
        (bucket,) = by_hand({"a": matrix(2, 2)}, [["a"]])
        update = "muon" if letter == "m" else "adamw"
        bucket.plan = BucketPlan(
            name=f"{letter}{index}", kind="whole", names=("a",), num_elements=4, update=update
        )
        found.append(bucket)
    return found


@pytest.mark.parametrize("updates", ["a", "m", "aaa", "amammmmmmma", "mmmmmmmmmm"])
def test_each_bucket_is_updated_once_with_few_on_their_way(updates: str) -> None:
    buckets = plans(updates)
    jobs = [(kind, bucket.name) for kind, bucket in update_order(buckets)]
    elements = [name for kind, name in jobs if kind == "elements"]
    assert elements == [bucket.name for bucket in buckets if bucket.plan.update == "adamw"]
    matrices = [bucket.name for bucket in buckets if bucket.plan.update == "muon"]
    for kind in ("send", "orthogonalise", "apply"):
        assert [name for found, name in jobs if found == kind] == matrices
    on_the_way, waiting = 0, 0
    for kind, name in jobs:
        on_the_way += (kind == "send") - (kind == "apply")
        waiting += (kind == "orthogonalise") - (kind == "apply")
        assert 0 <= on_the_way <= TRAINING_PIECES.muon_buckets
        assert 0 <= waiting <= TRAINING_PIECES.muon_results + 1
        if kind == "send":
            continue
        before = [k for k, other in jobs[: jobs.index((kind, name))] if other == name]
        expected = ("send", "orthogonalise", "apply")
        assert kind == "elements" or before == [*expected[: expected.index(kind)]]


class Watched(MemoryOffloadStore):
    """Write down what is fetched and put."""

    def __init__(self, log: list[str]) -> None:
        """Write into `log`."""
        super().__init__("device", device_memory(CPU))
        self.log = log

    def fetch(self, keys: Sequence[str], *, read: bool = True) -> ImmediateFetch:
        """Note a fetch."""
        self.log.append(f"fetch {','.join(keys)}{'' if read else ' unread'}")
        return ImmediateFetch(super().fetch(keys).wait())

    def put(
        self,
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        complete: Callable[[], object] | None = None,
    ) -> None:
        """Note a put."""
        super().put(keys, tensors, complete)
        self.log.append(f"put {','.join(keys)}")


def test_what_comes_next_is_fetched_before_a_job_runs() -> None:
    log: list[str] = []
    rest = Watched(log)
    for key in ("a", "b", "c"):
        rest.add(key, 1, torch.float32)

    def job(*keys: str, read: bool = True) -> UpdateTask:
        return UpdateTask(
            tensors=[StoredTensorRequest(store=rest, keys=(key,), read=read) for key in keys],
            run=lambda tensors: log.append(f"run {''.join(keys)} {len(tensors)}"),
            done=lambda: log.append(f"done {''.join(keys)}"),
        )

    run_update_tasks([job("a", "b"), job(), job("c", read=False)])
    assert log == [
        *("fetch a", "fetch b"),
        *("run ab 2", "put a", "put b", "done ab"),
        "fetch c unread",
        *("run  0", "done "),
        *("run c 1", "put c", "done c"),
    ]
