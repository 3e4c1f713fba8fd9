"""How large a pipeline may be about which a command is asked: more ends in no answer, or no memory.

The limits of the numbers are the same for every command. One that goes through all actions limits
their product, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

from echelon.core.errors import ConfigError
from echelon.core.rulebook.cost import PREDICTION_IN_RANGE

_MOST = {"pp": 1024, "microbatches": 8192, "virtual-stages": 64}
"""The most of each flag."""
MOST_DRAWN = 2**15
"""So many forward passes of a stage are built, checked, simulated and drawn in some seconds."""
MOST_SEARCHED = 2**13
"""A search goes through all actions many times."""


def require_size(
    *, pp: int, microbatches: int, virtual_stages: int = 1, most_passes: int | None = None
) -> None:
    """Refuse numbers out of range, all of them at once; ConfigError names the nearest that works.

    `most_passes` limits how many forward passes the stages make together in a step.
    """
    asked = {"pp": pp, "microbatches": microbatches, "virtual-stages": virtual_stages}
    near = {flag: min(max(value, 1), _MOST[flag]) for flag, value in asked.items()}
    small = most_passes is None or prod(near.values()) <= most_passes
    fewer = [] if small else [_all_fewer(near, most_passes or 1)]
    problems = [
        PREDICTION_IN_RANGE.problem(
            f"--{flag} {value} is not in 1 to {_MOST[flag]}",
            set_by="the command line",
            works=fewer or [f"--{flag} {near[flag]}"],
        )
        for flag, value in asked.items()
        if value != near[flag]
    ]
    if not problems and not small:
        stages, passes = pp * virtual_stages, prod(asked.values())
        problems.append(
            PREDICTION_IN_RANGE.problem(
                f"{stages} stages x {microbatches} microbatches are {passes} forward passes; more "
                f"than {most_passes} are not gone through action by action",
                set_by="the command line",
                works=_one_fewer(asked, most_passes or 1) or fewer,
            )
        )
    if problems:
        raise ConfigError(problems)


def _one_fewer(asked: Mapping[str, int], most_passes: int) -> list[str]:
    """Return what one number may be instead, if that is enough.

    Schedules want two microbatches a rank or more, and some of them even numbers.
    """
    pp, microbatches, virtual = asked.values()
    fewer_m = _even(most_passes // (pp * virtual))
    fewer_p = _even(most_passes // (microbatches * virtual))
    found = [f"--microbatches {fewer_m}"] if fewer_m >= 2 * pp else []
    return [*found, f"--pp {fewer_p}"] if 1 <= fewer_p <= microbatches // 2 else found


def _all_fewer(near: Mapping[str, int], most_passes: int) -> str:
    """Return numbers that are enough together, with two microbatches a rank or more."""
    pp, _, virtual = near.values()
    fewer_p = _even(min(pp, isqrt(most_passes // (2 * virtual))))
    fewer_m = _even(most_passes // (fewer_p * virtual))
    stages = f" --virtual-stages {virtual}" if virtual > 1 else ""
    return f"--pp {fewer_p} --microbatches {min(fewer_m, _MOST['microbatches'])}{stages}"


def _even(number: int) -> int:
    return number - number % 2 if number > 1 else number
