# SPDX-License-Identifier: Apache-2.0
"""What must hold of data: a run that trains names it; a mixture has a weight for each source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from echelon.config.entries import DEFAULT
from echelon.config.job import DataSettings, Job, ResolvedSetting
from echelon.config.rules.violations import RuleViolation
from echelon.config.settings.mixture_list import mixture_parts
from echelon.config.settings.value_types import toml_text
from echelon.config.view import View
from echelon.core.choices.data_mixture import phases_of, places_of, sources_of
from echelon.core.errors import Problem
from echelon.core.rulebook.config import CONFLICTING_SETTINGS, NO_EFFECT
from echelon.core.rulebook.data import DATA_IS_NAMED, MIXTURE_PARTS, MIXTURE_SCHEDULE

KEY = "data.mixture"
SOURCE_KEY = "data.source"
WAYS = (
    f'{SOURCE_KEY} = "stdlib" (the source of Python, to try a run out)',
    f'{SOURCE_KEY} = "PATH" or a URL (text; jsonl; parquet; a folder of these)',
    f'{SOURCE_KEY} = "FOLDER" (written by echelon data prepare)',
)
"""How a run names its data."""


def unnamed_data() -> tuple[ResolvedSetting, ...]:
    """Sources of the settings of a job without data."""
    return (
        ResolvedSetting(key=SOURCE_KEY, value=toml_text(DataSettings().source), source=DEFAULT),
    )


def data_is_named(job: Job) -> bool:
    """True if a file, a preset, a flag or a caller names the data of `job`."""
    return bool(job.data.mixture) or job.source_of(SOURCE_KEY) != DEFAULT


def data_problems(job: Job) -> list[Problem]:
    """Problem of a job that trains and names no data."""
    if data_is_named(job):
        return []
    message = f"{SOURCE_KEY} is not set: nothing says what {job.plan.name} reads"
    return [DATA_IS_NAMED.problem(message, key=SOURCE_KEY, suggestions=WAYS)]


def mixture_is_a_schedule(view: View) -> Iterator[RuleViolation]:
    """Yield sources with two weights in a phase, phases that end early, and shares of nothing."""
    parts = mixture_parts(view.value(KEY))
    if not parts:
        return
    for (path, end), count in Counter((part.path, part.until_step) for part in parts).items():
        if count > 1:
            when = "the last phase" if end is None else f"the phase until step {end}"
            message = f"{path} has {count} weights in {when}"
            yield RuleViolation(rule=MIXTURE_SCHEDULE, key=KEY, message=message)
            return
    phases, steps = phases_of(parts), view.integer("train.steps")
    last = phases[-1].until_step
    if last is not None and last < steps:
        yield RuleViolation(
            rule=MIXTURE_SCHEDULE,
            key=KEY,
            message=f"no weight holds from step {last} on, and train.steps = {steps}",
            set_by=(KEY, "train.steps"),
            suggestions=(f"train.steps = {last}",),
        )
    for phase in phases:
        if phase.until_step is not None and phase is not phases[-1] and phase.until_step >= steps:
            message = f"train.steps = {steps} ends before the phase until step {phase.until_step}"
            yield RuleViolation(
                rule=MIXTURE_SCHEDULE,
                key=KEY,
                message=f"{message}, so the phases after it are never reached",
                set_by=(KEY, "train.steps"),
            )
            return
        for path, weight, places in zip(
            sources_of(parts), phase.weights, places_of(phase.weights), strict=True
        ):
            if weight > 0 and not places:
                share = weight / sum(phase.weights)
                yield RuleViolation(
                    rule=MIXTURE_PARTS, key=KEY, message=f"{path} has a share of {share:.1e} only"
                )


def mixture_is_the_source(view: View) -> Iterator[RuleViolation]:
    """Yield what a mixture takes the place of, and an order that only a single source has."""
    if not mixture_parts(view.value(KEY)):
        return
    if not view.is_default("data.source"):
        yield RuleViolation(
            rule=CONFLICTING_SETTINGS,
            key="data.source",
            message="data.mixture names what is read, and so does data.source",
            set_by=("data.source", KEY),
            suggestions=('data.source = "stdlib"',),
        )
    if view.word("data.epoch_end") == "pad":
        yield RuleViolation(
            rule=NO_EFFECT,
            key="data.epoch_end",
            message='data.epoch_end = "pad" changes nothing: the sources of a mixture have epochs '
            "of their own, which end anywhere in a step",
            suggestions=('data.epoch_end = "continue"',),
        )


MIXTURE_FINDERS = (mixture_is_a_schedule, mixture_is_the_source)
