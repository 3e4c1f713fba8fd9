# SPDX-License-Identifier: Apache-2.0
"""The published run that is nearest to a plan, and how far it is from it.

A step is predicted by constants that were fitted to published runs, so it is as good as the runs
beside it. Runs are compared by what moves a prediction most: the trainer, the device, whether a
model is a mixture of experts, and by how many doublings they differ in parameters, devices, and
tokens that a kernel is started for. `measured_runs.csv` holds each distinct run once, rounded to
powers of two (`python -m bench.accuracy.residuals --write` writes it).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log2

from echelon.cost.bytes.model_sizes import block_weights, embedding_and_head_weights
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import LayoutNumbers, ModelNumbers, first_number
from echelon.planner.predict.residuals import UNKNOWN

FILE = "measured_runs.csv"
OTHER_TRAINER = 3.0
"""Doublings of a size that another trainer counts as much as."""
OTHER_DEVICE = 2.0
"""Doublings of a size that another device counts as much as."""
OTHER_KIND = 3.0
"""Doublings of a size that a mixture beside a dense model counts as much as."""
FAR = 2.0
"""Doublings of one size from which on a run is far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Give a run by what a prediction depends on most; sizes are powers of two."""

    trainer: str
    device: str
    experts: bool
    parameters: float
    devices: float
    tokens: float
    """Tokens of a microbatch on one context rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestRun:
    """Hold the measured run that is nearest to a plan, and in what the plan differs by much."""

    run: MeasuredRun
    differences: tuple[str, ...]


def nearest_run(work: CostInputs, trainer: str | None, device: str | None) -> NearestRun:
    """Return the measured run that is nearest to a plan of a trainer on a kind of device."""
    plan = run_of(work, trainer or UNKNOWN, device or UNKNOWN)
    run = min(measured_runs(), key=lambda one: _distance(plan, one))
    return NearestRun(run=run, differences=tuple(_differences(plan, run)))


def run_of(work: CostInputs, trainer: str, device: str) -> MeasuredRun:
    """Return a plan as such a run."""
    return MeasuredRun(
        trainer=trainer,
        device=device,
        experts=first_number(work.model.experts) > 0,
        parameters=power_of_two(num_parameters(work.model)),
        devices=power_of_two(first_number(work.layout.devices)),
        tokens=power_of_two(first_number(work.tokens)),
    )


def num_parameters(model: ModelNumbers) -> float:
    """Return how many weights a model has."""
    alone = LayoutNumbers()
    dense, _ = block_weights(model, alone, mixture=False)
    mixed, routed = block_weights(model, alone, mixture=True)
    mixtures = model.mixture_layers
    blocks = (model.layers - mixtures) * dense + mixtures * (mixed + routed)
    return first_number(blocks + embedding_and_head_weights(model, alone))


@cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """Return the runs that constants were fitted to, each distinct one once."""
    text = (files("echelon.planner.predict") / FILE).read_text(encoding="utf-8")
    return tuple(
        MeasuredRun(
            trainer=row["trainer"],
            device=row["device"],
            experts=row["experts"] == "1",
            parameters=float(row["parameters"]),
            devices=float(row["devices"]),
            tokens=float(row["tokens"]),
        )
        for row in csv.DictReader(text.splitlines())
    )


def power_of_two(value: float) -> float:
    """Return the power of two that is nearest to a value, by its logarithm."""
    return 2.0 ** round(log2(max(value, 1.0)))


def _distance(plan: MeasuredRun, run: MeasuredRun) -> float:
    return (
        OTHER_TRAINER * _other(plan.trainer, run.trainer)
        + OTHER_DEVICE * _other(plan.device, run.device)
        + OTHER_KIND * (plan.experts != run.experts)
        + sum(abs(log2(mine / theirs)) for mine, theirs in _sizes(plan, run).values())
    )


def _other(mine: str, theirs: str) -> bool:
    """Return whether two names differ: what is not known of both is not the same."""
    return mine != theirs or mine == UNKNOWN


def _sizes(plan: MeasuredRun, run: MeasuredRun) -> dict[str, tuple[float, float]]:
    return {
        "parameters": (plan.parameters, run.parameters),
        "devices": (plan.devices, run.devices),
        "tokens of a microbatch": (plan.tokens, run.tokens),
    }


def _differences(plan: MeasuredRun, run: MeasuredRun) -> Iterator[str]:
    """Yield what a run is that is far from a plan: `on A100`, `with 4 times the devices`."""
    if _other(plan.trainer, run.trainer):
        yield f"by {run.trainer}"
    if _other(plan.device, run.device):
        yield f"on {run.device}"
    if plan.experts != run.experts:
        yield "of a mixture of experts" if run.experts else "of a dense model"
    for name, (mine, theirs) in _sizes(plan, run).items():
        if abs(log2(mine / theirs)) >= FAR:
            times = max(mine, theirs) / min(mine, theirs)
            share = f"{times:g} times" if theirs > mine else f"1/{times:g} of"
            yield f"with {share} the {name}"
