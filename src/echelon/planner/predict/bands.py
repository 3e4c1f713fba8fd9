# SPDX-License-Identifier: Apache-2.0
"""Numbers with what is not known of them: seconds and bytes of a plan, and of a difference.

A band is how far predictions were from published runs like the plan (`band_evidence`: four of
five lie inside), or that of `planner/predict/estimate.py` where it is wider: everything hidden
behind compute that can be, or nothing; an allocator that holds back nothing, or twice its usual
slack. Both plans of a difference run under the same trainer on the same devices, so most of what is
not known of one is not known of the other: its band is how far the ratio of two runs of one sweep
was off.

What no run tells of a plan makes its band wider, by what is stated here. Bytes of parameters,
gradients and optimizer state, and bytes sent, are counted: they have no band.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, hypot, log, log2
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import MachineNumbers, first_number
from echelon.cost.seconds.stages import COMPUTED
from echelon.cost.seconds.step import step_seconds
from echelon.cost.seconds.trainers import FITTED, OURS, OVERLAPS, UNFITTED_FRAMEWORKS
from echelon.planner.predict.estimate import Estimate, counted_terms
from echelon.planner.predict.nearest_run import nearest_run
from echelon.planner.predict.residuals import (
    HELD,
    LEFT_OUT,
    MOST_DEVICES,
    PAIRS,
    STEP,
    UNKNOWN,
    Factors,
)

NEAR = 0.1
"""How far apart the logarithms of two plans' seconds are that are near to each other."""
FAMILIES: Mapping[tuple[int, int], str] = {
    (80, 125): "V100",
    (108, 312): "A100",
    (132, 989): "H100",
    (148, 2250): "B200",
    (148, 2500): "GB200",
    (304, 1300): "MI300X",
    (128, 165): "RTX4090",
    (170, 210): "RTX5090",
    (188, 504): "RTXPRO6000",
    (142, 362): "L40S",
}
"""Multiprocessors and TFLOP/s of a half-width product -> a family of which runs were measured."""
LATER_FAMILIES: Mapping[str, str] = {"B200": "B300", "GB200": "GB300"}
LATER_BYTES = 250e9
"""Bytes of memory above which a device is of a later family."""
_UNPUBLISHED_TRAINERS = frozenset({"generic", OURS})
"""Names of constants that are those of no trainer of which runs were published."""
ALLOCATORS = frozenset({"megatron-deepspeed", "internevo"})
"""Trainers whose memory was published in more than one run."""
STEP_CONSTANTS = ("host_s", "width_bytes", "inner_bytes", "step_s")
"""Constants that only measured steps change."""

MEASURED_HERE: Factors = (0.75, 1.5)
"""On a machine that `echelon calibrate` measured, where its file has no error of held-out steps."""
HELD_OUT_SPREAD = 1.476 * 1.2533
"""Half a band of four in five by the mean error of five held-out steps: Student's t for five (its
0.9 quantile), times the deviation of a normal error over its mean, sqrt(pi / 2)."""
LEAST_HELD_OUT = 0.02
"""The error below which held-out steps are not believed; assumed: their own noise."""
_DOUBLED: Factors = (0.98, 1.04)
"""For each doubling of devices beyond those of any run."""
_OFFLOADED: Factors = (0.95, 1.5)
"""Optimizer state rests with the host: no published run says how fast a host updates it."""
_ALLOCATED: Factors = (0.85, 1.25)
"""Of what is not counted in memory, under a trainer that published none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandEvidence:
    """Hold how far off an estimate can be, measured / predicted, and what that rests on.

    `held` is of the bytes that are not counted. `similar_runs` says which runs are like the plan,
    `untested` what none of them tells.
    """

    step: Factors
    held: Factors
    similar_runs: str
    untested: tuple[str, ...]
    differences: tuple[str, ...] = ()
    """In what the measured run that is nearest to the plan differs from it by much."""


def band_evidence(work: CostInputs) -> BandEvidence:
    """Return what the band of one plan rests on."""
    trainer, family = trainer_from_constants(work.software), device_family(work.machine)
    held = _held_factors(work.software)
    devices = first_number(work.layout.devices)
    more = dict(_factors_beyond_runs(work, devices))
    if _measured_here(work.software):
        error = first_number(work.software.step_error)
        here = measured_factors(error)
        like = f", {100 * error:.0f} % off at steps that it held out" if error > 0.0 else ""
        return BandEvidence(
            step=combine_factors(here, *more.values()) if more else here,
            held=held,
            similar_runs=f"this machine, calibrated{like}",
            untested=tuple(more),
        )
    experts = first_number(work.model.experts) > 0
    untested = tuple(step_untested(trainer, family, experts=experts))
    off = step_deviation(trainer, family, experts=experts)
    like = f"{trainer or 'other trainers'} on {family or 'other devices'}"
    return BandEvidence(
        step=combine_factors((exp(-off), exp(off)), *more.values()),
        held=held,
        similar_runs=f"{like}, mixtures of experts" if experts else like,
        untested=(*untested, *more),
        differences=nearest_run(work, trainer, family).differences,
    )


def measured_factors(error: float) -> Factors:
    """Return how far off a step can be on a machine whose held-out steps were off by `error`."""
    if error <= 0.0:
        return MEASURED_HERE
    off = HELD_OUT_SPREAD * log(1.0 + max(error, LEAST_HELD_OUT))
    return exp(-off), exp(off)


def step_deviation(trainer: str | None, family: str | None, *, experts: bool) -> float:
    """Return how far the logarithm of a step's seconds is off in four of five runs.

    They are runs of the trainer on such devices that no fit saw, or else runs of trainers, or of
    devices, that no fit saw, whichever is not known; of both where neither is.
    """
    kind = "experts" if experts else "dense"
    found = STEP[kind].get(trainer or "", {}).get(family or "")
    if found is not None:
        return found
    missing = [LEFT_OUT[name][kind] for name in _unknown_parts(trainer, family)]
    return hypot(*missing) if missing else max(each[kind] for each in LEFT_OUT.values())


def step_untested(trainer: str | None, family: str | None, *, experts: bool) -> Iterator[str]:
    """Yield what no run tells of a step: its trainer, its device, or both of them together."""
    missing = _unknown_parts(trainer, family)
    yield from (f"its {name}" for name in missing)
    kind = "experts" if experts else "dense"
    if not missing and family not in STEP[kind].get(trainer or UNKNOWN, {}):
        yield f"its trainer on such devices{' with experts' if experts else ''}"


def _unknown_parts(trainer: str | None, family: str | None) -> list[str]:
    parts = {"trainer": trainer, "device": family}
    return [name for name, value in parts.items() if value in (None, UNKNOWN)]


def _held_factors(software: TrainerConstants) -> Factors:
    known = trainer_from_constants(software) in ALLOCATORS
    return HELD if known else combine_factors(HELD, _ALLOCATED)


def combine_factors(*factors: Factors) -> Factors:
    """Return the factors of several causes, each on its own: logarithms add up in squares."""
    low = hypot(*(min(0.0, log(one[0])) for one in factors))
    high = hypot(*(max(0.0, log(one[1])) for one in factors))
    return exp(-low), exp(high)


def pair_factors(first_s: float, second_s: float) -> Factors:
    """Return how far off the ratio of two plans' seconds can be."""
    off = PAIRS["near" if abs(log(second_s / first_s)) < NEAR else "far"]
    return exp(-off), exp(off)


def trainer_from_constants(software: TrainerConstants) -> str | None:
    """Return the generation of trainers with these constants, None where no run told of it."""
    for name, constants in FITTED.items():
        same = (first_number(getattr(software, key)) == value for key, value in constants.items())
        if name not in _UNPUBLISHED_TRAINERS and all(same):
            return name
    return None


def device_family(machine: MachineNumbers) -> str | None:
    """Return the family of a device, None where no run told of it."""
    key = round(first_number(machine.units)), round(first_number(machine.attention_flops) / 1e12)
    found = FAMILIES.get(key)
    if first_number(machine.memory_bytes) > LATER_BYTES and found is not None:
        return LATER_FAMILIES.get(found, found)
    return found


def _factors_beyond_runs(work: CostInputs, devices: float) -> Iterator[tuple[str, Factors]]:
    """Yield what is in a plan that is in no run, or in few, and how far off that can be."""
    if first_number(work.layout.offload) > 0:
        yield "offload", _OFFLOADED
    if devices > MOST_DEVICES:
        times = log2(devices / MOST_DEVICES)
        name = f"more than {MOST_DEVICES:,} devices"
        yield name, (_DOUBLED[0] ** times, _DOUBLED[1] ** times)


def _measured_here(software: TrainerConstants) -> bool:
    """Return whether constants are those of steps that were measured on devices at hand."""
    if first_number(software.step_error) > 0.0:
        return True
    usual = UNFITTED_FRAMEWORKS[OURS]
    other = any(
        first_number(getattr(software, name)) != getattr(usual, name) for name in STEP_CONSTANTS
    )
    return first_number(software.host_adds) > 0 and other


@dataclass(frozen=True, slots=True, kw_only=True)
class BandedValue:
    """Hold a number with the least and the most that it can be."""

    value: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Return whether all of the band is on one side of zero."""
        return self.low > 0.0 or self.high < 0.0


BandedTerms: TypeAlias = Mapping[str, BandedValue]
"""What each term of a step, or of what is held, takes."""


def step_band(estimate: Estimate) -> BandedValue:
    """Return the seconds of a step."""
    low, high = band_evidence(estimate.inputs).step
    step = estimate.step_s
    return _banded(step, *estimate.step_band, low * step, high * step)


def fit_probability(estimate: Estimate, memory_bytes: float) -> float:
    """Return the probability that the fullest rank holds no more than `memory_bytes`.

    What is not counted is off by a factor whose logarithm is taken to be normal, with four of five
    inside the band.
    """
    low, high = band_evidence(estimate.inputs).held
    counted = estimate.bytes_counted
    rest = estimate.bytes_held - counted
    room = memory_bytes - counted
    if room <= 0.0:
        return 0.0
    if rest <= 0.0:
        return 1.0
    middle, deviation = _normal_of(low, high)
    return NormalDist(middle, deviation).cdf(log(room / rest))


def held_factor(software: TrainerConstants, probability: float) -> float:
    """Return what bytes that are not counted are multiplied by to be below it so probably."""
    return exp(NormalDist(*_normal_of(*_held_factors(software))).inv_cdf(probability))


def _normal_of(low: float, high: float) -> tuple[float, float]:
    """Return mean and deviation of the logarithm of a factor, of which four of five are between."""
    quantile = NormalDist().inv_cdf(0.9)
    return (log(low) + log(high)) / 2.0, (log(high) - log(low)) / (2.0 * quantile)


def held_bytes_band(estimate: Estimate) -> BandedValue:
    """Return the bytes of the fullest rank; those that are counted have no band."""
    low, high = band_evidence(estimate.inputs).held
    counted = estimate.bytes_counted
    rest = estimate.bytes_held - counted
    ends = counted + low * rest, counted + high * rest
    return _banded(estimate.bytes_held, *estimate.bytes_band, *ends)


def byte_term_bands(estimate: Estimate) -> BandedTerms:
    """Return every term of what the fullest rank holds with its band: none where it is counted."""
    low, high = band_evidence(estimate.inputs).held
    counted = counted_terms(estimate.bytes, by_lists=estimate.by_lists)
    return {
        name: _banded(value) if name in counted else _banded(value, low * value, high * value)
        for name, value in estimate.bytes.items()
    }


def mfu_band(estimate: Estimate) -> BandedValue:
    """Return the share of the devices' peak that the model's FLOPs are."""
    return _rate(estimate.mfu, step_band(estimate))


def tokens_per_s_band(estimate: Estimate) -> BandedValue:
    """Return the tokens of a device in a second."""
    return _rate(estimate.tokens_per_s_per_device, step_band(estimate))


def price_band(estimate: Estimate, price_per_device_hour: float) -> BandedValue:
    """Return what a million tokens cost."""
    step = step_band(estimate)
    each = estimate.token_price(price_per_device_hour) / step.value
    return BandedValue(value=each * step.value, low=each * step.low, high=each * step.high)


def step_term_bands(estimate: Estimate) -> BandedTerms:
    """Return every term of a step with its band, in the order of the formulas."""
    hidden, shown = _shifted(estimate, 1.0), _shifted(estimate, 0.0)
    low, high = band_evidence(estimate.inputs).step
    return {
        name: _banded(value, hidden[name], shown[name], low * value, high * value)
        for name, value in estimate.seconds.items()
    }


def step_difference_band(first: Estimate, second: Estimate) -> BandedValue:
    """Return how many seconds longer the step of `second` is, under one trainer on one cluster."""
    ends = [
        factor * second.step_s - first.step_s
        for factor in pair_factors(first.step_s, second.step_s)
    ]
    worlds = [
        sum(_shifted(second, hidden).values()) - sum(_shifted(first, hidden).values())
        for hidden in (1.0, 0.0)
    ]
    return _banded(second.step_s - first.step_s, *worlds, *ends)


def step_term_differences(first: Estimate, second: Estimate) -> BandedTerms:
    """Return how many seconds longer each term of `second` is, the largest change first.

    Where events say that a step is shorter than by its closed form, stages are cut more evenly: it
    is the head that costs less.
    """
    now, *others = [(_settled(first, h), _settled(second, h)) for h in (None, 1.0, 0.0)]
    found = {
        name: _banded(now[1][name] - now[0][name], *(b[name] - a[name] for a, b in others))
        for name in first.seconds
    }
    return dict(sorted(found.items(), key=lambda term: -abs(term[1].value)))


def byte_term_differences(first: Estimate, second: Estimate) -> tuple[tuple[str, float], ...]:
    """Return how many bytes more each term of `second` holds, what grew most first."""
    found = [(name, second.bytes[name] - held) for name, held in first.bytes.items()]
    return tuple(sorted(found, key=lambda item: -item[1]))


def _rate(value: float, step: BandedValue) -> BandedValue:
    """Return the band of what a step's seconds divide."""
    whole = value * step.value
    return BandedValue(value=value, low=whole / step.high, high=whole / step.low)


def _banded(value: float, *others: float) -> BandedValue:
    return BandedValue(value=value, low=min((value, *others)), high=max((value, *others)))


def _settled(estimate: Estimate, hidden: float | None) -> Mapping[str, float]:
    """Return the terms, those of compute as the closed form has them but for the head.

    Blocks that make room for the head save what events say to be less.
    """
    found = dict(estimate.seconds if hidden is None else _shifted(estimate, hidden))
    closed = step_seconds(estimate.inputs).terms
    saved = 0.0
    for name in COMPUTED:
        alone = float(np.sum(np.asarray(closed[name])))
        saved += alone - estimate.seconds[name]
        found[name] += alone - estimate.seconds[name]
    of_head = min(saved, found["head"])
    found["head"] -= of_head
    found["bubble"] -= saved - of_head
    return found


def _shifted(estimate: Estimate, hidden: float) -> Mapping[str, float]:
    """Return the terms with so much hidden as can be (1), or nothing (0).

    What events said stays: the closed form says only by how much a term changes.
    """
    work = estimate.inputs
    software = replace(work.software, **dict.fromkeys(OVERLAPS, hidden))
    other = step_seconds(replace(work, software=software)).terms
    closed = step_seconds(work).terms
    return {
        name: value + float(np.sum(np.asarray(other[name]) - np.asarray(closed[name])))
        for name, value in estimate.seconds.items()
    }
