# SPDX-License-Identifier: Apache-2.0
"""Two steps of data parallelism as four ranks recorded them: a model of six weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from echelon.page.lessons.traces import read_trace

Numbers = tuple[float, ...]
WEIGHTS = {"hidden.weight": (2, 2), "output.weight": (1, 2)}
"""The shape of each matrix [out, in]."""
TOLERANCE = 1e-12  # of a gradient
NAMES = {"hidden.weight": "W1", "output.weight": "W2"}
"""What they are called in lessons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """Hold what one rank did in one step."""

    samples: tuple[int, ...]
    """What it read."""
    loss: float
    """The mean loss of these samples."""
    gradients: Mapping[str, Numbers]
    """Its own gradient of each matrix, before the sum over ranks."""
    sums: Mapping[str, Numbers]
    """The sum over ranks of each."""
    weights: Mapping[str, Numbers]
    """What it had after the update."""
    order: tuple[tuple[str, str], ...]
    """What it did, in order: a kind, and the matrix that it was done to or ""."""
    sent: Mapping[str, int]
    """Bytes that it sent to sum each matrix."""
    messages: Mapping[str, tuple[int, ...]]
    """To whom its messages went that summed each matrix, in order."""

    @property
    def sends_early(self) -> bool:
        """Return whether a sum was under way before backward had made all gradients."""
        kinds = [kind for kind, _ in self.order]
        last_gradient = len(kinds) - 1 - kinds[::-1].index("gradient")
        return kinds.index("all_reduce") < last_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Hold the run: steps of each rank, the weights at first, and the first batch on one device."""

    learning_rate: float
    given: tuple[Mapping[str, Numbers], ...]
    """Weights that each rank was given."""
    start: tuple[Mapping[str, Numbers], ...]
    """Weights of each rank when training began: those of rank 0."""
    steps: tuple[tuple[RankStep, ...], ...]
    """Steps, each with what its ranks did."""
    alone_loss: float
    """The loss of all samples of the first step, on one device."""
    alone: Mapping[str, Numbers]
    """The gradient of each matrix there."""

    @property
    def num_ranks(self) -> int:
        """Return how many ranks there were."""
        return len(self.given)

    def mean(self, step: int, name: str) -> Numbers:
        """Return what an update takes: the sum over ranks, divided by their number."""
        return tuple(one / self.num_ranks for one in self.steps[step][0].sums[name])


@lru_cache(maxsize=1)
def recorded_run() -> RecordedRun:
    """Return what the ranks recorded."""
    found = read_trace("data_parallel")
    ranks: Sequence[Mapping[str, Any]] = found["ranks"]
    return RecordedRun(
        learning_rate=found["learning_rate"],
        given=tuple(_weights(one["given"]) for one in ranks),
        start=tuple(_weights(one["start"]) for one in ranks),
        steps=tuple(
            tuple(_rank_step(one["steps"][step], one["buckets"]) for one in ranks)
            for step in range(len(ranks[0]["steps"]))
        ),
        alone_loss=ranks[0]["alone"]["loss"],
        alone=_weights(ranks[0]["alone"]["gradients"]),
    )


def _weights(found: Mapping[str, Sequence[float]]) -> dict[str, Numbers]:
    return {name: tuple(numbers) for name, numbers in found.items()}


def _rank_step(found: Mapping[str, Any], buckets: Mapping[str, Sequence[str]]) -> RankStep:
    """Return a step; each bucket of this model holds one matrix, and may be padded."""
    of = {name: names[0] for name, names in buckets.items()}
    logged: Mapping[str, dict[str, Numbers]] = {"all_reduce": {}, "summed": {}}
    order: list[tuple[str, str]] = []
    for entry in found["log"]:
        kind, name = str(entry["kind"]), str(entry.get("name", ""))
        matrix = of.get(name, name)
        order.append((kind, matrix))
        if kind in logged:
            rows, columns = WEIGHTS[matrix]
            logged[kind][matrix] = tuple(entry["values"][: rows * columns])
    return RankStep(
        # A thread runs the sums in the order in which they were started.
        messages=dict(zip(logged["all_reduce"], map(tuple, found["messages"]), strict=True)),
        samples=tuple(found["samples"]),
        loss=found["loss"],
        gradients=logged["all_reduce"],
        sums=logged["summed"],
        weights=_weights(found["weights"]),
        order=tuple(order),
        sent={of[name]: sent for name, sent in found["sent"].items()},
    )


def number_text(value: float) -> str:
    """Return a number to five decimals at most, without zeros at its end."""
    text = f"{value:.5f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def numbers_text(numbers: Numbers, name: str) -> str:
    """Return the numbers of a matrix in lines, aligned by their last digits."""
    rows, columns = WEIGHTS[name]
    texts = [number_text(one) for one in numbers]
    width = max(map(len, texts))
    lines = (texts[row * columns : (row + 1) * columns] for row in range(rows))
    return "\n".join(" ".join(f"{one:>{width}}" for one in line) for line in lines)


def mean_loss(run: RecordedRun, step: int) -> float:
    """Return the loss of a whole batch: the mean of its ranks', which have as many samples each."""
    return sum(one.loss for one in run.steps[step]) / run.num_ranks


def same_weights(run: RecordedRun, step: int) -> bool:
    """Return whether all ranks had the same weights after a step, bit for bit."""
    return all(one.weights == run.steps[step][0].weights for one in run.steps[step])


def as_on_one_device(run: RecordedRun) -> bool:
    """Return whether the mean gradient of the first step is that of all its samples at once."""
    return all(
        abs(ours - theirs) <= TOLERANCE
        for name, alone in run.alone.items()
        for ours, theirs in zip(run.mean(0, name), alone, strict=True)
    )


def sum_words(run: RecordedRun, name: str, rank: int, other: int) -> str:
    """Return what a rank sent another in the first step to sum a matrix, in words."""
    count = run.steps[0][rank].messages[name].count(other)
    return f"rank {rank} sends rank {other} {count} messages to sum the gradients of {NAMES[name]}"
