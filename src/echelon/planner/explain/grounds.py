"""What a band rests on: published runs that are like a plan, and what of it no run tells.

`planner/residuals.py` has how far predictions were from runs that nobody had fitted: of a trainer
and device that other runs tell of, of a trainer that none does, of a device that none does. Four of
five lie in between. What no run tells of a plan makes its band wider, by what is stated here. Bytes
of parameters, gradients and optimizer state, and bytes sent, are counted: they have no band.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, hypot, log, log2

import numpy as np

from echelon.cost.lattice.block import Work
from echelon.cost.lattice.fitted import FITTED
from echelon.cost.lattice.frameworks import FRAMEWORKS
from echelon.cost.lattice.numbers import MachineNumbers, Num
from echelon.cost.lattice.software import Software
from echelon.planner.estimate import OURS
from echelon.planner.residuals import EXPERTS, HELD, MOST_DEVICES, PAIRS, STEP, Factors

EXACT = ("parameters", "gradients", "optimizer")
"""Terms of what is held that are counted, not estimated."""
NODE = 8
"""Devices of a run up to which it counts as one on one node."""
NEAR = 0.1
"""How far apart the logarithms of two plans' seconds are that are near to each other."""
FAMILIES: Mapping[tuple[int, int], str] = {(108, 312): "A100", (132, 989): "H100"}
"""Multiprocessors and TFLOP/s of a half-width product -> a family of which runs were measured."""
NOBODY = frozenset({"generic", OURS})
"""Names of constants that are those of no trainer of which runs were published."""
ALLOCATORS = frozenset({"megatron-deepspeed", "internevo"})
"""Trainers whose memory was published in more than one run."""
BY_STEPS = ("host_s", "width_bytes", "inner_bytes", "step_s")
"""Constants that only measured steps change."""

HERE: Factors = (0.75, 1.5)
"""On a machine that `echelon calibrate` measured; its file does not keep what the fit was off."""
DOUBLED: Factors = (0.98, 1.04)
"""For each doubling of devices beyond those of any run."""
OFFLOADED: Factors = (0.95, 1.5)
"""Optimizer state rests with the host: no published run says how fast a host updates it."""
ALLOCATED: Factors = (0.85, 1.25)
"""Of what is not counted in memory, under a trainer that published none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """Hold how far off an estimate can be, measured / predicted, and what that rests on.

    `held` is of the bytes that are not counted. `like` says which runs are like the plan, `beyond`
    what none of them tells.
    """

    step: Factors
    held: Factors
    like: str
    beyond: tuple[str, ...]


def grounds_of(work: Work) -> Grounds:
    """Return what the band of one plan rests on."""
    trainer, family = trainer_of(work.software), family_of(work.machine)
    held = HELD if trainer in ALLOCATORS else together(HELD, ALLOCATED)
    if _measured_here(work.software):
        return Grounds(step=HERE, held=held, like="this machine, calibrated", beyond=())
    devices = _number(work.layout.devices)
    place = "node" if devices <= NODE else "nodes"
    kinds = {"its trainer": trainer is None, "its device": family is None}
    found = {name: STEP[name.split()[1]][place] for name, unknown in kinds.items() if unknown}
    base = _widest(STEP["known"][place], together(*found.values()))
    more = dict(_beyond(work, devices))
    like = f"{trainer or 'other trainers'} on {family or 'other devices'}"
    return Grounds(
        step=together(base, *more.values()), held=held, like=like, beyond=(*found, *more)
    )


def together(*factors: Factors) -> Factors:
    """Return the factors of several causes, each on its own: logarithms add up in squares."""
    low = hypot(*(min(0.0, log(one[0])) for one in factors))
    high = hypot(*(max(0.0, log(one[1])) for one in factors))
    return exp(-low), exp(high)


def _widest(*factors: Factors) -> Factors:
    return min(low for low, _ in factors), max(high for _, high in factors)


def pair_factors(first_s: float, second_s: float) -> Factors:
    """Return how far off the ratio of two plans' seconds can be."""
    off = PAIRS["near" if abs(log(second_s / first_s)) < NEAR else "far"]
    return exp(-off), exp(off)


def trainer_of(software: Software) -> str | None:
    """Return the generation of trainers with these constants, None where no run told of it."""
    for name, constants in FITTED.items():
        same = (_number(getattr(software, key)) == value for key, value in constants.items())
        if name not in NOBODY and all(same):
            return name
    return None


def family_of(machine: MachineNumbers) -> str | None:
    """Return the family of a device, None where no run told of it."""
    key = round(_number(machine.units)), round(_number(machine.attention_flops) / 1e12)
    return FAMILIES.get(key)


def _beyond(work: Work, devices: float) -> Iterator[tuple[str, Factors]]:
    """Yield what is in a plan that is in no run, or in few, and how far off that can be."""
    if _number(work.model.experts) > 0:
        yield "its experts (few runs)", EXPERTS
    if _number(work.layout.offload) > 0:
        yield "offload", OFFLOADED
    if devices > MOST_DEVICES:
        times = log2(devices / MOST_DEVICES)
        name = f"more than {MOST_DEVICES:,} devices"
        yield name, (DOUBLED[0] ** times, DOUBLED[1] ** times)


def _measured_here(software: Software) -> bool:
    """Return whether constants are those of steps that were measured on processors at hand."""
    usual = FRAMEWORKS[OURS]
    other = any(_number(getattr(software, name)) != getattr(usual, name) for name in BY_STEPS)
    return _number(software.host_adds) > 0 and other


def _number(value: Num) -> float:
    return float(np.asarray(value).reshape(-1)[0])
