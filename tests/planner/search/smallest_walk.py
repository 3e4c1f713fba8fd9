"""Smallest clusters beside an exhaustive search: every smaller cluster is planned, and none plans.

`python -m tests.planner.search.smallest_walk 40` compares so many cases, and prints each with the
CPU seconds of the answer and of the exhaustive search.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

from echelon.planner.search.request import SearchRequest, make_request
from echelon.planner.search.search import clusters_of_devices, search, smallest_that_fits

MODELS = {
    "gpt2-xl": ("v100-16gb", "rtx4090"),
    "llama2-7b": ("rtx4090", "v100-32gb", "a100-40gb", "mi250x"),
    "llama3-8b": ("a100-40gb", "h100", "l40s", "a100-80gb"),
    "llama2-13b": ("rtx4090", "a100-40gb", "h100"),
    "qwen3-32b": ("a100-80gb", "l40s", "h200"),
    "mixtral-8x7b": ("h100", "mi300x"),
    "llama2-70b": ("rtx4090", "a100-80gb"),
}
"""Devices that each model is tried on."""
BATCHES = (16, 96)
"""Sequences of a global batch."""
LENGTH = 2048  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Hold the smallest cluster of a case, that of an exhaustive search, and their CPU seconds."""

    case: tuple[str, str, int]
    found: str
    exhaustive: str
    answer_s: float
    exhaustive_s: float


def cases() -> list[tuple[str, str, int]]:
    """Return every case: a model, the devices, the sequences of a batch."""
    return [
        (model, device, batch)
        for model, devices in MODELS.items()
        for device in devices
        for batch in BATCHES
    ]


def request_of(case: tuple[str, str, int], cluster: str) -> SearchRequest:
    """Return the request of a case on a cluster, made as the command line makes it."""
    model, _, batch = case
    length = min(LENGTH, 1024) if model.startswith("gpt2") else LENGTH
    sets = [f"batch.global_sequences={batch}", f"batch.sequence_length={length}"]
    return make_request(model, cluster=cluster, settings=sets)


def exhaustive(case: tuple[str, str, int], most: int) -> str:
    """Return the first cluster that a search has a plan for, of those up to `most` devices."""
    for cluster in clusters_of_devices(f"1x{case[1]}"):
        if cluster.num_devices > most:
            return f"none up to {most}"
        if search(replace(request_of(case, cluster.name), top=1)).best is not None:
            return cluster.name
    raise AssertionError("clusters do not end")


def compare(case: tuple[str, str, int]) -> Compared:
    """Return the answer of a case, and the exhaustive search's."""
    started = time.process_time()
    found = smallest_that_fits(request_of(case, f"1x{case[1]}"))
    answered = time.process_time()
    assert found is not None, case
    first = exhaustive(case, found.num_devices)
    return Compared(
        case=case,
        found=found.name,
        exhaustive=first,
        answer_s=answered - started,
        exhaustive_s=time.process_time() - answered,
    )


if __name__ == "__main__":
    some = cases()[: int(sys.argv[1])]
    wrong = 0
    for one in map(compare, some):
        wrong += one.found != one.exhaustive
        model, device, batch = one.case
        print(
            f"{model:<14}{device:<12}{batch:>5}  {one.found:<14}{one.exhaustive:<14}"
            f"{one.answer_s:7.2f} s{one.exhaustive_s:8.2f} s",
            flush=True,
        )
    print(f"{len(some)} cases, {wrong} of them not the smallest")
    sys.exit(wrong > 0)
