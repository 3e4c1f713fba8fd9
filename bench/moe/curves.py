"""Train a mixture of experts on text with even and uneven loads, beside a dense model.

Four runs of `examples/experts.toml`: balanced by a loss, by biases, not at all; and the dense model
with as many active weights in its feed-forward parts (`ffn` is `top_k` times that of an expert),
which sees the same tokens from the same seed. What the runs wrote is put into one page: the loss
of each step (that of the cross-entropy alone), the validation loss, the imbalance.

    python -m bench.moe.curves runs bench/results/experts.md

With `--alone` one rank trains, with the same numbers but for their rounding. A run that is in the
folder already, as far as its last step, is read and not trained again.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import echelon as ec
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.telemetry.events import METRICS_FILE
from echelon.telemetry.json_lines import LogEntry, last_of_each_step, read_entries
from echelon.telemetry.routing import RecordedLoad, read_routing
from echelon.telemetry.run_directory import open_run

EXAMPLE = Path("examples/experts.toml")
AUX_COEFFICIENT, BIAS_RATE = 0.02, 0.003
LENGTH = 128
"""Tokens of a sequence, as the example has them."""

WINDOW = 20
"""A smoothed figure is of that many steps: the one that is named, and those before."""

GOAL, BY_STEP = 1.3, 200

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "aux": ("experts.balance=aux", f"experts.aux_coefficient={AUX_COEFFICIENT}"),
    "bias": ("experts.balance=bias", f"experts.bias_rate={BIAS_RATE}"),
    "none": ("experts.balance=none",),
    "dense": (),
}
TITLES: Mapping[str, str] = {
    "aux": f"8 experts, auxiliary loss ({AUX_COEFFICIENT})",
    "bias": f"8 experts, biases ({BIAS_RATE})",
    "none": "8 experts, nothing evens loads",
    "dense": "dense, equal active weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Hold what one run said of each step (the first is step 1), and its validation losses.

    `loads` are those of each layer by step; a dense model has none.
    """

    active: int
    total: int
    losses: Sequence[float]
    loads: Mapping[int, Sequence[RecordedLoad]]
    validations: Mapping[int, float]

    def loss(self, step: int) -> float:
        """Return the mean loss of the steps up to this one."""
        return fmean(self.losses[max(0, step - WINDOW) : step])

    def imbalance(self, step: int, window: int = 1) -> float:
        """Return that of the worst layer, of the loads of all steps of a window together."""
        steps = [self.loads[one] for one in range(max(1, step - window + 1), step + 1)]
        worst = 1.0
        for layer in zip(*steps, strict=True):
            counts = [sum(column) for column in zip(*(load.counts for load in layer), strict=True)]
            worst = max(worst, max(counts) * len(counts) / sum(counts))
        return worst


def settings_of(variant: str, given: argparse.Namespace) -> list[str]:
    """Return the settings of a variant."""
    mesh: list[str] = []
    if variant == "dense":
        mesh = [] if given.alone else ["mesh.dp_replicate=2"]
    elif given.alone:
        mesh = ["mesh.dp_shard=1", "mesh.ep=1"]
    shared = [
        f"train.runs_dir={given.runs}",
        *mesh,
        f"train.steps={given.steps}",
        f"batch.global_sequences={given.sequences}",
        f"train.run_name={variant}",
        "train.validate_every=80",
        "checkpoint.every=never",
        "observe.events=false",
        "observe.log_every=1",
    ]
    return [*shared, *VARIANTS[variant]]


def run_file(variant: str, folder: Path) -> Path:
    """Return the example without what it says of loads; of a dense model, of experts."""
    dropped = ["[experts]", *(["[model.experts]", "[mesh]"] if variant == "dense" else [])]
    kept: list[str] = []
    table = ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        table = line if line.startswith("[") else table
        if table not in dropped:
            kept.append(line)
    path = folder / f"{variant}.toml"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return path


def train_variant(variant: str, given: argparse.Namespace) -> Curve:
    """Train a variant, unless its run is there, and return what it wrote."""
    file, settings = run_file(variant, given.runs), settings_of(variant, given)
    job = load_job(file, settings)
    run = given.runs / variant
    if not is_whole(run, job):
        result = ec.train(file, settings=settings)
        if result.summary.stopped:
            raise SystemExit(f"{variant} was stopped: remove {result.run} and begin it again")
    entries = list(read_entries(run / METRICS_FILE))
    taken = last_of_each_step([one for one in entries if one.text("kind") == "step"])
    validated = last_of_each_step([one for one in entries if one.text("kind") == "validation"])
    return Curve(
        active=num_active_parameters(job.plan.model),
        total=num_parameters(job.plan.model),
        losses=[number(step, "loss") for step in taken],
        loads=read_routing(run),
        validations={one.whole("step"): number(one, "loss") for one in validated},
    )


def is_whole(run: Path, job: Job) -> bool:
    """Return whether a run of this job took all of its steps."""
    entries = [one for one in read_entries(run / METRICS_FILE) if one.text("kind") == "step"]
    if not entries or entries[-1].whole("step") != job.train.steps:
        return False
    return open_run(run).plan().mathematics == job.plan.mathematics


def number(entry: LogEntry, key: str) -> float:
    """Return a number that must be finite."""
    found = entry.number(key)
    assert found is not None, f"{key} of a step of these runs is finite"
    return found


def page(curves: Mapping[str, Curve], given: argparse.Namespace) -> str:
    """Return the page of results."""
    steps = given.steps
    alone = " --alone" if given.alone else ""
    size = f" --sequences {given.sequences}"
    command = f"python -m bench.moe.curves RUNS {given.page} --steps {steps}{size}{alone}"
    ranks = "one rank" if given.alone else "two ranks, ep 2"
    points = sorted({1, *range(BY_STEP // 4, steps + 1, BY_STEP // 4), steps})
    lines = [
        "# Experts on text: even loads, and the dense model beside them",
        "",
        f"`{command}` on {platform.machine()}, {steps} steps of {given.sequences * LENGTH} tokens "
        f"of the source of Python's standard library, on {ranks}; the same seed, samples, learning "
        "rate and steps in every run.",
        "",
        *weights_table(curves),
        "",
        f"Loss of the training batches: the mean of the {WINDOW} steps up to the one named "
        "(cross-entropy alone, no auxiliary loss in it).",
        "",
        *table(curves, points, lambda curve, step: f"{curve.loss(step):.4f}"),
        "",
        "Validation loss.",
        "",
        *table(
            curves,
            sorted(curves["dense"].validations),
            lambda curve, step: f"{curve.validations[step]:.4f}",
        ),
        "",
        "Imbalance: tokens of the busiest expert over the mean, in the worst of all layers; of the "
        f"step alone, and in brackets of {WINDOW} steps together, up to it.",
        "",
        *table(curves, points, imbalance_cell),
        "",
        *verdicts(curves, steps),
    ]
    return "\n".join(lines) + "\n"


def weights_table(curves: Mapping[str, Curve]) -> Iterator[str]:
    """Yield how many weights each model has."""
    yield "| run | weights | active for a token |"
    yield "| --- | ---: | ---: |"
    for name, curve in curves.items():
        yield f"| {TITLES[name]} | {curve.total:,} | {curve.active:,} |"


def table(
    curves: Mapping[str, Curve], points: Sequence[int], cell: Callable[[Curve, int], str]
) -> Iterator[str]:
    """Yield a table with a column for each run."""
    yield f"| step | {' | '.join(TITLES[name] for name in curves)} |"
    yield f"| ---: |{' ---: |' * len(curves)}"
    for step in points:
        yield f"| {step} | {' | '.join(cell(curve, step) for curve in curves.values())} |"


def imbalance_cell(curve: Curve, step: int) -> str:
    """Return the imbalance of a step, and that of the steps up to it together."""
    if not curve.loads:
        return "-"
    return f"{curve.imbalance(step):.3f} ({curve.imbalance(step, WINDOW):.3f})"


def verdicts(curves: Mapping[str, Curve], steps: int) -> Iterator[str]:
    """Yield what the runs say of the goals."""
    later = range(BY_STEP, steps + 1)
    mixtures = {name: curve for name, curve in curves.items() if curve.loads}
    for name, curve in mixtures.items():
        within = sum(curve.imbalance(step, WINDOW) < GOAL for step in later)
        alone = sum(curve.imbalance(step) < GOAL for step in later)
        yield (
            f"- {TITLES[name]}: at step {BY_STEP} the imbalance is {curve.imbalance(BY_STEP):.3f}, "
            f"and {curve.imbalance(BY_STEP, WINDOW):.3f} over {WINDOW} steps. Of the {len(later)} "
            f"steps from there on, {within} are below {GOAL} over {WINDOW} steps, {alone} alone."
        )
    dense = curves["dense"]
    last = max(dense.validations)
    for name, curve in mixtures.items():
        trained = curve.loss(steps) - dense.loss(steps)
        validated = curve.validations[last] - dense.validations[last]
        yield (
            f"- {TITLES[name]}: at step {steps} the training loss is {trained:+.4f} and the "
            f"validation loss {validated:+.4f} beside the dense model's."
        )


def main() -> None:
    """Train what is missing and write the page."""
    parser = argparse.ArgumentParser(description="Train and write the page.")
    parser.add_argument("runs", type=Path, help="the folder of the runs")
    parser.add_argument("page", type=Path, help="the file to write")
    parser.add_argument("--steps", type=int, default=320, help="steps of each run")
    parser.add_argument("--sequences", type=int, default=16, help="sequences of a step")
    parser.add_argument("--alone", action="store_true", help="on one rank, not on two")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    curves = {name: train_variant(name, given) for name in VARIANTS}
    given.page.write_text(page(curves, given), encoding="utf-8")


if __name__ == "__main__":
    main()
