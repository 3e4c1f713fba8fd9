"""Random pairs of clusters of the same devices: the larger one is never slower, idle devices count.

`python -m tests.planner.recommend.monotone_walk 100` draws so many pairs, and prints each with the
seconds of the fastest plan that surely fits and of the recommended plan on both clusters.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from echelon.core.errors import ConfigError
from echelon.planner.recommend.device_counts import best_count
from echelon.planner.recommend.recommend import (
    Recommendation,
    best_on_devices,
    noise,
    recommend,
    surely_fitting,
)
from echelon.planner.search.request import SearchAim, SearchRequest, make_request

MODELS = (
    *("nano", "gpt2-xl", "llama2-7b", "llama3-8b", "llama2-13b", "qwen3-32b", "llama3-70b"),
    *("mixtral-8x7b", "gpt3-175b"),
)
DEVICES = ("h100", "a100-80gb", "a100-40gb", "rtx4090", "v100-32gb", "l40s", "h200", "mi300x")
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64, 80, 88, 96, 104, 128, 192, 256)
BATCHES = (8, 12, 32, 48, 96, 100, 256, 512)
"""Sequences of a global batch."""
TRAINERS = ("echelon", "megatron", "torchtitan", "deepspeed", "accelerate")
LENGTH = 2048  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MonotoneCase:
    """Hold a model, the devices, how many there are of them first and then, and the run."""

    model: str
    device: str
    counts: tuple[int, int]
    trainer: str
    batch: int

    def request(self, count: int) -> SearchRequest:
        """Return the request on so many of the devices."""
        length = 1024 if self.model in ("nano", "gpt2-xl") else LENGTH
        return make_request(
            self.model,
            cluster=f"{count}x{self.device}",
            settings=[
                f"batch.global_sequences={self.batch}",
                f"batch.sequence_length={length}",
                *(["model.max_positions=1024"] if self.model == "nano" else []),
            ],
            aim=SearchAim(trainer=self.trainer),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSeconds:
    """Hold the steps of a cluster in seconds, infinite without a plan, and whether it fits."""

    fastest: float
    recommended: float
    sure: bool


def drawn_cases(seed: int) -> Iterator[MonotoneCase]:
    """Yield random cases without end; those whose trainer cannot run the model are left out."""
    draw = random.Random(seed)
    while True:
        counts = sorted(draw.sample(COUNTS, 2))
        case = MonotoneCase(
            model=draw.choice(MODELS),
            device=draw.choice(DEVICES),
            counts=(counts[0], counts[1]),
            trainer=draw.choice(TRAINERS),
            batch=draw.choice(BATCHES),
        )
        try:
            case.request(counts[0])
        except ConfigError:
            continue
        yield case


def planned_seconds(request: SearchRequest) -> PlannedSeconds:
    """Return what a cluster takes for a step at its fastest, and as recommended."""
    found = recommend(request)
    if not isinstance(found, Recommendation):
        return PlannedSeconds(fastest=inf, recommended=inf, sure=False)
    recommended = found.first.ranked.estimate.step_s
    answer = best_on_devices(surely_fitting(request))
    fastest = inf
    if answer.best is not None:
        fastest = best_count(answer, noise()).answer.first.estimate.step_s
    return PlannedSeconds(fastest=fastest, recommended=recommended, sure=found.sure)


def broken(first: PlannedSeconds, second: PlannedSeconds) -> tuple[str, ...]:
    """Return in what more devices are slower, where the plan on fewer fits as surely.

    Seconds of one plan on two clusters may differ in their last digits.
    """
    most = 1.0 + 1e-9
    found: list[str] = []
    if second.fastest > most * first.fastest:
        found.append("the fastest")
    if second.recommended > most * first.recommended and (first.sure or not second.sure):
        found.append("the recommended")
    if first.sure and not second.sure:
        found.append("the surely fitting")
    return tuple(found)


if __name__ == "__main__":
    slower, planned = 0, 0
    for number, case in enumerate(drawn_cases(int(sys.argv[2]) if len(sys.argv) > 2 else 0)):
        if number == int(sys.argv[1]):
            break
        few, many = (planned_seconds(case.request(count)) for count in case.counts)
        wrong = broken(few, many)
        slower += bool(wrong)
        planned += few.recommended < inf
        print(
            f"{case.model:<14}{case.device:<11}{case.trainer:<11}{case.batch:>4}  "
            f"{case.counts[0]:>4} {few.fastest:9.4g} {few.recommended:9.4g} {few.sure:1}  "
            f"{case.counts[1]:>4} {many.fastest:9.4g} {many.recommended:9.4g} {many.sure:1}  "
            f"{', '.join(wrong)}",
            flush=True,
        )
    print(f"{number} pairs, {planned} with a plan on the fewer devices, {slower} slower on more")
    sys.exit(slower > 0)
