"""Train a mixture of experts on text with even and uneven loads, beside a dense model.

Four runs of `examples/experts.toml`: balanced by a loss, by biases, not at all; and the dense model
with as many active weights in its feed-forward parts (`ffn` is `top_k` times that of an expert),
which sees the same tokens from the same seed. What the runs wrote is put into one page: the loss
of each step (that of the cross-entropy alone), the validation loss, the imbalance.

    python -m bench.experts_curves runs bench/results/experts.md

A run that is in the folder already, as far as its last step, is read and not trained again.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import echelon as ec
from echelon.config.load import load_job
from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.observe.entries import Entry, last_of_each_step, read_entries
from echelon.observe.observer import METRICS_FILE

EXAMPLE = Path("examples/experts.toml")
AUX_COEFFICIENT, BIAS_RATE = 0.01, 0.003
WINDOW = 20
"""Steps over which a smoothed figure is the mean of: these, and the ones before."""

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
    """Hold what one run said of each step (the first is step 1), and its validation losses."""

    active: int
    total: int
    losses: Sequence[float]
    imbalances: Sequence[float]
    validations: Mapping[int, float]

    def loss(self, step: int) -> float:
        """Return the mean loss of the steps up to this one."""
        return fmean(self.losses[max(0, step - WINDOW) : step])

    def imbalance(self, step: int) -> float | None:
        """Return the mean imbalance of the steps up to this one; None of a dense model."""
        if not self.imbalances:
            return None
        return fmean(self.imbalances[max(0, step - WINDOW) : step])


def settings_of(variant: str, steps: int) -> list[str]:
    """Return the settings of a variant."""
    shared = [
        f"train.steps={steps}",
        f"train.run_name={variant}",
        "train.validate_every=50",
        "checkpoint.every=never",
        "observe.events=false",
        "observe.log_every=50",
    ]
    return [*shared, *VARIANTS[variant]]


def dense_file(folder: Path) -> Path:
    """Return a run file of the dense model: the example without what it says of experts."""
    kept: list[str] = []
    table = ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        table = line if line.startswith("[") else table
        if table not in ("[model.experts]", "[experts]") and not line.startswith("ep ="):
            kept.append(line)
    path = folder / "dense.toml"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return path


def train_variant(variant: str, runs: Path, steps: int) -> Curve:
    """Train a variant, unless its run is there, and return what it wrote."""
    file = dense_file(runs) if variant == "dense" else EXAMPLE
    job = load_job(file, [*settings_of(variant, steps), f"train.runs_dir={runs}"])
    run = runs / variant
    if not is_whole(run, steps):
        run = ec.train(file, settings=[*settings_of(variant, steps), f"train.runs_dir={runs}"]).run
    entries = list(read_entries(run / METRICS_FILE))
    taken = last_of_each_step([one for one in entries if one.text("kind") == "step"])
    validated = last_of_each_step([one for one in entries if one.text("kind") == "validation"])
    return Curve(
        active=num_active_parameters(job.plan.model),
        total=num_parameters(job.plan.model),
        losses=numbers(taken, "loss"),
        imbalances=[] if variant == "dense" else numbers(taken, "imbalance"),
        validations={one.whole("step"): number(one, "loss") for one in validated},
    )


def is_whole(run: Path, steps: int) -> bool:
    """Return whether a run took all of its steps."""
    entries = [one for one in read_entries(run / METRICS_FILE) if one.text("kind") == "step"]
    return bool(entries) and entries[-1].whole("step") == steps


def numbers(entries: Sequence[Entry], key: str) -> list[float]:
    """Return a number of each entry."""
    return [number(entry, key) for entry in entries]


def number(entry: Entry, key: str) -> float:
    """Return a number that must be finite."""
    found = entry.number(key)
    assert found is not None, f"{key} of a step of these runs is finite"
    return found


def page(curves: Mapping[str, Curve], steps: int, command: str) -> str:
    """Return the page of results."""
    points = [1, *range(BY_STEP // 4, steps + 1, BY_STEP // 4)]
    lines = [
        "# Experts on text: even loads, and the dense model beside them",
        "",
        f"`{command}` on {platform.machine()}, {steps} steps of 2048 tokens of the source of "
        "Python's standard library, 2 ranks, ep 2; the same seed, samples, learning rate and steps "
        "in every run.",
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
        f"step alone, and in brackets the mean of {WINDOW} steps up to it.",
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
    """Return the imbalance of a step, and the mean of those up to it."""
    mean = curve.imbalance(step)
    return "-" if mean is None else f"{curve.imbalances[step - 1]:.3f} ({mean:.3f})"


def verdicts(curves: Mapping[str, Curve], steps: int) -> Iterator[str]:
    """Yield what the runs say of the goals."""
    for name in ("aux", "bias", "none"):
        mean = curves[name].imbalance(BY_STEP)
        raw = curves[name].imbalances[BY_STEP - 1]
        rest = curves[name].imbalances[BY_STEP - 1 :]
        assert mean is not None, "these have experts"
        within = sum(one < GOAL for one in rest)
        yield (
            f"- {TITLES[name]}: imbalance {raw:.3f} at step {BY_STEP} (mean {mean:.3f}); below "
            f"{GOAL} in {within} of the {len(rest)} steps from there on."
        )
    last = max(curves["dense"].validations)
    dense = curves["dense"]
    for name in ("aux", "bias", "none"):
        curve = curves[name]
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
    parser.add_argument("--steps", type=int, default=400, help="steps of each run")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    curves = {name: train_variant(name, given.runs, given.steps) for name in VARIANTS}
    command = f"python -m bench.experts_curves RUNS {given.page} --steps {given.steps}"
    given.page.write_text(page(curves, given.steps, command), encoding="utf-8")


if __name__ == "__main__":
    main()
