"""Judge published production choices by the planner: their predicted regret, and our own choice.

`python -m bench known_answers` runs the planner for each row of `bench/data/known_answers.csv`,
pinned to the published layout and free. Printed are predicted seconds of both, whether the
published choice fits, the measured rate as seconds of a step, and the regret: how much slower the
published choice is predicted to be than the plan that we recommend. Exit 1 where the median is
above 5 %, or a row above 20 % has no named reason; 2 where `--only` names no row.

Columns: the model is a preset with `settings` over it; the cluster `devices` x a preset; a blank
cell of a layout is something that the source does not say, and that the planner may choose.
`limits` are pins of both plans, for what the trainer of the run had no choice of. Both plans of a
row have the conditions of its run: products in fp8, attention that keeps scores, and dtypes of
states, gradients and the loss where `checked` names a row of the data that says them. Ours is what
`echelon plan` answers (`planner/recommend/`): the simplest plan within the noise of the fastest,
which fits with a probability of 0.95.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median

from bench.accuracy.published.rows import Row, read_rows
from bench.accuracy.published.trainer_defaults import with_named_settings
from echelon.core.errors import ConfigError
from echelon.cost.fit.runs import plan_label
from echelon.cost.seconds.kernels import attended_positions, attention_width
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.ranked import RankedPlan
from echelon.planner.search.request import SearchAim, SearchRequest, make_request
from echelon.planner.search.search import search

DATA = Path(__file__).parent / "data"
FILE = DATA / "known_answers.csv"
RUNS = ("measured_runs.csv", "further_runs.csv", "consumer_runs.csv")
"""Files of measured runs that `checked` may name a row of."""
OPENED = ("opened",)
"""What `checked` says where the source itself was read."""
PLAIN = "plain"
"""What `attention` says where scores are kept, as before FlashAttention (May 2022)."""
PINNED = (
    "tp",
    "cp",
    "pp",
    "virtual",
    "ep",
    "zero",
    "microbatch",
    "recompute",
    "schedule",
    "context",
    "dp_replicate",
    "reshard",
    "offload",
)
"""Columns of a layout, called as the pins that they become."""
UNITS = ("step_s", "tokens_s", "tflops", "hw_tflops", "causal_tflops")
"""What a measured rate is: seconds of a step, tokens/s of a device, TFLOP/s of a device.

Those of the hardware count recompute; causal ones count half of the attention."""
GPT_POSITIONS = 2048  # tokens
HARDWARE_PASSES = 4.0 / 3.0
"""FLOPs of a step with full recompute, over those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold one published choice."""

    name: str
    cells: Mapping[str, str]

    @property
    def reason(self) -> str:
        """Return why its authors chose what our formulas would not; "" where nobody knows."""
        return self.cells["reason"]

    @property
    def pins(self) -> tuple[str, ...]:
        """Return its layout as pins; state stays on the device where nobody says more."""
        found = [f"{name}={self.cells[name]}" for name in PINNED if self.cells[name]]
        return (*found,) if self.cells["offload"] else (*found, "offload=none")

    @property
    def measured_run(self) -> Row | None:
        """Return the row of the data that says more of the run; None where the source was read."""
        return None if self.cells["checked"] in OPENED else measured_runs()[self.cells["checked"]]

    def request(self, *pins: str) -> SearchRequest:
        """Return what to search for; ConfigError where the row is wrong."""
        cells = self.cells
        settings = [one for one in cells["settings"].split(";") if one]
        settings.append(f"batch.sequence_length={cells['sequence_length']}")
        settings.append(f"batch.global_sequences={cells['global_batch']}")
        length = int(cells["sequence_length"])
        pinned = {one.partition("=")[0] for one in pins}
        limits = [one for one in cells["limits"].split(";") if one]
        limits = [one for one in limits if one.partition("=")[0] not in pinned]
        if cells["model"].startswith("gpt") and length > GPT_POSITIONS:
            settings.append(f"model.max_positions={length}")
        found = make_request(
            cells["model"],
            cluster=f"{cells['devices']}x{cells['cluster']}",
            settings=settings,
            pins=(*pins, *limits),
            aim=SearchAim(top=1, trainer=cells["trainer"]),
        )
        run, software = self.measured_run, found.software
        if run is not None:
            software = with_named_settings(run, software, found.trainer)
        if cells["attention"] == PLAIN:
            software = replace(software, fused_attention=0.0)
        narrow = "fp8" if cells["precision"] == "fp8" else None
        return replace(found, software=software, matmul_dtype=narrow)

    def measured_s(
        self, tokens: float, model_flops: float, attention_flops: float = 0.0
    ) -> float | None:
        """Return the measured seconds of a step; None if unknown.

        `model_flops` are those of a step, and count all pairs of positions: so many are of these.
        """
        if not self.cells["measured"]:
            return None
        value, unit = float(self.cells["measured"]), self.cells["unit"]
        if unit == "step_s":
            return value
        devices = float(self.cells["devices"])
        if unit == "tokens_s":
            return tokens / devices / value
        if unit == "causal_tflops":
            model_flops -= attention_flops / 2.0
        passes = HARDWARE_PASSES if unit == "hw_tflops" else 1.0
        return passes * model_flops / (devices * value * 1e12)


@cache
def measured_runs() -> Mapping[str, Row]:
    """Return the rows of the data by their ids."""
    return {row.id: row for name in RUNS for row in read_rows(DATA / name)}


def read_answers(path: Path = FILE) -> list[Answer]:
    """Return the rows of a file; ValueError where a name stands twice, or a unit is none."""
    with path.open(encoding="utf-8", newline="") as file:
        found = [Answer(name=cells["name"], cells=cells) for cells in csv.DictReader(file)]
    names = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: more than one row is called {', '.join(twice)}")
    wrong = [one.name for one in found if one.cells["measured"] and one.cells["unit"] not in UNITS]
    if wrong:
        raise ValueError(f"{path}: the unit of {', '.join(wrong)} is none of {', '.join(UNITS)}")
    return found


UNBOUNDED_BYTES = 2.0**60
"""Memory of a device on which every published choice fits."""
GIB = 2.0**30
MANY = 0.2
"""The regret from which on a published choice needs a named reason."""
USUAL = 0.05
"""What the median regret of published choices is to be at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Hold what was found of a published choice: seconds of a step, bytes of the fullest rank."""

    answer: Answer
    problem: str = ""
    """Why nothing was found; "" where it was."""
    published_s: float = 0.0
    published_bytes: float = 0.0
    published: str = ""
    """The plan in a few words."""
    published_terms: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by term."""
    ours_s: float = 0.0
    """Seconds of the plan that is recommended."""
    ours: str = ""
    ours_terms: dict[str, float] = field(default_factory=dict[str, float])
    fastest_s: float = 0.0
    """Seconds of the fastest plan that is expected to fit."""
    fastest: str = ""
    measured_s: float | None = None
    """None where it is not known."""
    memory_bytes: float = 0.0

    @property
    def regret(self) -> float:
        """Return how much slower the published choice is predicted to be than what we recommend."""
        return self.published_s / self.ours_s - 1.0

    @property
    def regret_of_fastest(self) -> float:
        """Return the same beside the fastest plan."""
        return self.published_s / self.fastest_s - 1.0

    @property
    def fits(self) -> bool:
        """Return whether the published choice fits, by our bytes."""
        return self.published_bytes <= self.memory_bytes

    @property
    def unexplained(self) -> bool:
        """Return whether its regret is large and its row names no reason."""
        return not self.problem and self.regret > MANY and not self.answer.reason


def judge(answer: Answer) -> Judged:
    """Return the prediction of a published choice and of the planner's own."""
    try:
        request = answer.request()
        found = recommend(request)
        published = _published(answer)
    except ConfigError as error:
        return _without(answer, str(error).splitlines()[0])
    if not isinstance(found, Recommendation):
        return _without(answer, "no plan fits")
    if published is None:
        return _without(answer, "no plan has this layout")
    ours, estimate = found.first.ranked, published.estimate
    fastest = next((one.ranked for one in found.others if "fastest" in one.preferred_for), ours)
    shape, length = request.model, request.mathematics.sequence_length
    pairs = 12.0 * shape.layers * attention_width(shape) * attended_positions(shape, length)
    measured = answer.measured_s(estimate.tokens, estimate.model_flops, pairs * estimate.tokens)
    return Judged(
        answer=answer,
        published_s=estimate.step_s,
        published_bytes=estimate.bytes_held,
        published=_label(published),
        published_terms=dict(estimate.seconds),
        ours_s=ours.estimate.step_s,
        ours=_label(ours),
        ours_terms=dict(ours.estimate.seconds),
        fastest_s=fastest.estimate.step_s,
        fastest=_label(fastest),
        measured_s=measured,
        memory_bytes=request.memory_bytes,
    )


def _published(answer: Answer) -> RankedPlan | None:
    """Return the best plan with the published layout: one that fits, else with all recomputed.

    More virtual stages than a search walks are left open: `published` says which were taken.
    """
    request = answer.request(*answer.pins)
    for pins in (request.pins, request.pins.without("virtual")):
        found = search(replace(request, pins=pins)).best
        if found is None:
            full = pins if pins.values_of("recompute") else pins.having("recompute", 1)
            found = search(replace(request.with_memory(UNBOUNDED_BYTES), pins=full)).best
        if found is not None:
            return found
    return None


def _without(answer: Answer, problem: str) -> Judged:
    return Judged(answer=answer, problem=problem)


def _label(one: RankedPlan) -> str:
    label = "" if one.plan is None else plan_label(one.plan)
    ep = one.candidate.mesh.ep
    return f"{label} ep{ep}" if ep > 1 else label


def text_of(one: Judged, *, terms: bool = False) -> str:
    """Return a row in words, a few lines of it."""
    if one.problem:
        return f"{one.answer.name}\n  not judged: {one.problem}"
    held, memory = one.published_bytes / GIB, one.memory_bytes / GIB
    fit = "fits" if one.fits else "does not fit"
    lines = [
        f"{one.answer.name}: regret {one.regret:+.1%}",
        f"  published {one.published_s:8.3f} s  {one.published}; {fit}: {held:.1f} of"
        f" {memory:.1f} GiB",
        f"  ours      {one.ours_s:8.3f} s  {one.ours}",
    ]
    if one.fastest != one.ours:
        lines.append(f"  fastest   {one.fastest_s:8.3f} s  {one.fastest}")
    if one.measured_s is not None:
        off = one.published_s / one.measured_s - 1.0
        lines.append(f"  measured  {one.measured_s:8.3f} s  predicted {off:+.1%}")
    if one.regret > MANY:
        lines.append(f"  reason: {one.answer.reason or 'none is named'}")
    if terms:
        lines += [f"  {line}" for line in _terms(one)]
    return "\n".join(lines)


def _terms(one: Judged) -> list[str]:
    names = list(dict.fromkeys((*one.published_terms, *one.ours_terms)))
    gaps = {n: one.published_terms.get(n, 0.0) - one.ours_terms.get(n, 0.0) for n in names}
    ranked = sorted(names, key=lambda name: -abs(gaps[name]))
    return [
        f"{name:12} {one.published_terms.get(name, 0.0):8.3f} s, ours"
        f" {one.ours_terms.get(name, 0.0):8.3f} s"
        for name in ranked
        if abs(gaps[name]) >= 0.01 * one.ours_s
    ]


def summary(rows: list[Judged]) -> str:
    """Return the median and the largest regret, and what has no reason."""
    judged = [one for one in rows if not one.problem]
    if not judged:
        return "no row could be judged"
    worst = max(judged, key=lambda one: one.regret)
    fitting = sum(one.fits for one in judged)
    lines = [
        f"{len(judged)} of {len(rows)} published choices judged: median regret"
        f" {median(one.regret for one in judged):.1%} (wanted {USUAL:.0%}),"
        f" largest {worst.regret:.1%} ({worst.answer.name})",
        f"beside the fastest plan: median {median(one.regret_of_fastest for one in judged):.1%}",
        f"{fitting} of them fit by our bytes",
    ]
    bare = [one.answer.name for one in judged if one.unexplained]
    if bare:
        lines.append(f"above {MANY:.0%} without a named reason: {', '.join(bare)}")
    return "\n".join(lines)


def missed(rows: list[Judged]) -> bool:
    """Return whether a target is missed, or a row could not be judged."""
    judged = [one for one in rows if not one.problem]
    if len(judged) < len(rows) or any(one.unexplained for one in judged):
        return True
    return not judged or median(one.regret for one in judged) > USUAL


def main(words: list[str] | None = None) -> int:
    """Judge the rows, print them, and return 1 where a target is missed."""
    arguments = _parser().parse_args(words)
    rows = read_answers()
    wanted: list[str] = arguments.only or [one.name for one in rows]
    unknown = sorted(set(wanted) - {one.name for one in rows})
    if unknown:
        names = ", ".join(one.name for one in rows)
        print(f"--only {unknown[0]}: no row has this name; there are {names}", file=sys.stderr)
        return 2
    started = time.process_time()
    found: list[Judged] = []
    for row in rows:
        if row.name in wanted:
            found.append(judge(row))
            print(text_of(found[-1], terms=arguments.terms), flush=True)
    print(f"\n{summary(found)}\n{time.process_time() - started:.0f} s of CPU")
    return 1 if missed(found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench known_answers", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a row; can be repeated")
    parser.add_argument(
        "--terms", action="store_true", help="print where the seconds of both plans differ"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
