# SPDX-License-Identifier: Apache-2.0
"""What must hold between stages and blocks: each block once, in order, and a list per stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.config.cluster.settings import read_cluster
from echelon.config.files.times_file import CPU, FITTED, TimesFile, read_times
from echelon.config.rules.pipeline import suggest_placements
from echelon.config.rules.suggestions import SettingChanges, Way, change_text
from echelon.config.rules.violations import RuleViolation
from echelon.config.settings.pipeline import (
    NONE,
    STAGES_KEY,
    TIMES_KEY,
    num_stages,
    stages_per_rank,
)
from echelon.config.settings.schema import CLUSTER_SOURCES
from echelon.config.settings.value_types import toml_text
from echelon.config.view import View
from echelon.core.errors import ConfigError
from echelon.core.rulebook.pipeline import (
    LAYERS_FILL_STAGES,
    STAGES_COVER_LAYERS,
    STAGES_MATCH_MESH,
    UNIT_TIMES_FIT_RUN,
)
from echelon.schedule.plan_problems import coverage_problem

MOST_LISTED = 16  # blocks in a message
INSTEAD = (f'{TIMES_KEY} = "none"', "echelon calibrate RUN")
LEFT_TO_US: Way = [{STAGES_KEY: "auto"}]


def layers_fill_stages(view: View) -> Iterator[RuleViolation]:
    """Check that every stage gets a block, unless somebody says which ones do not."""
    if view.stage_lists() is not None:
        return
    stages, layers = num_stages(view), view.integer("model.layers")
    if layers < stages:
        virtual = stages_per_rank(view)
        ways: list[Way] = [suggest_placements]
        if stages <= MOST_LISTED:
            listed: list[list[int]] = [[layer] if layer < layers else [] for layer in range(stages)]
            ways.append({STAGES_KEY: listed})
        product = f"mesh.pp = {view.integer('mesh.pp')}"
        product += f" x {virtual} stages on each rank" if virtual > 1 else ""
        yield RuleViolation(
            rule=LAYERS_FILL_STAGES,
            message=f"{product} makes {stages} stages, but {view.model_name} has {layers} blocks",
            key="mesh.pp",
            set_by=("mesh.pp", "model.layers"),
            suggestions=ways,
        )


def stages_match_mesh(view: View) -> Iterator[RuleViolation]:
    """Check that there is one explicit list for each stage."""
    stages = view.stage_lists()
    if stages is not None and len(stages) != num_stages(view):
        yield RuleViolation(
            rule=STAGES_MATCH_MESH,
            message=f"{STAGES_KEY} lists {len(stages)} stages, but pp x virtual_stages = "
            f"{view.integer('mesh.pp')} x {stages_per_rank(view)} = {num_stages(view)}",
            key=STAGES_KEY,
            set_by=(STAGES_KEY, "mesh.pp"),
            suggestions=("one list for each stage", LEFT_TO_US),
        )


def stages_cover_layers(view: View) -> Iterator[RuleViolation]:
    """Check that explicit stages hold each block once, in order; a stage may be empty."""
    stages = view.stage_lists()
    if stages is None:
        return
    layers = view.integer("model.layers")
    faults = coverage_problem(stages, layers)
    if faults:
        yield RuleViolation(
            rule=STAGES_COVER_LAYERS,
            message=f"{STAGES_KEY}: {'; '.join(faults)}",
            key=STAGES_KEY,
            set_by=(STAGES_KEY,),
            suggestions=(_mended(stages, layers), LEFT_TO_US),
        )


def _mended(stages: Sequence[Sequence[int]], layers: int) -> list[SettingChanges]:
    """Return the lists with as many blocks as they have, in order, the last taking what is left."""
    if not stages or layers > 4 * MOST_LISTED:
        return []
    ends = [min(layers, sum(map(len, stages[: s + 1]))) for s in range(len(stages))]
    ends[-1] = layers
    found = [list(range(a, b)) for a, b in zip((0, *ends), ends, strict=False)]
    return [{STAGES_KEY: found}]


def times_fit(view: View) -> Iterator[RuleViolation]:
    """Check that measured times can be read, and were measured with the settings of this run."""
    entry = view.entry(TIMES_KEY)
    if entry.value == NONE:
        return
    try:
        found = read_times(view.path(TIMES_KEY), entry.source)
    except ConfigError as error:
        for problem in error.problems:
            yield RuleViolation.from_problem(problem, origin=problem.set_by)
        return
    yield from _device_fits(view, found)
    here = {key: view.value(key) for key in FITTED}
    wrong = {key: value for key, value in found.fits.items() if not _same(value, here[key])}
    if not wrong:
        return
    parts = [
        f"{key} = {toml_text(value)} (here {toml_text(here[key])})" for key, value in wrong.items()
    ]
    yield RuleViolation(
        rule=UNIT_TIMES_FIT_RUN,
        message=f"{entry.value} was measured with {', '.join(parts)}",
        key=TIMES_KEY,
        set_by=(TIMES_KEY, *wrong),
        suggestions=(change_text(wrong), *INSTEAD),
    )


def _device_fits(view: View, found: TimesFile) -> Iterator[RuleViolation]:
    """Yield that a CPU was measured for a cluster of GPUs, or a GPU for one of CPU ranks."""
    cluster = read_cluster(view)
    if isinstance(cluster, list) or (found.device == CPU) == (cluster.backend == "gloo"):
        return
    yield RuleViolation(
        rule=UNIT_TIMES_FIT_RUN,
        message=f"{view.entry(TIMES_KEY).value} was measured on {_device(found.device)}, but "
        f"the devices of {cluster.name} are {cluster.device.name}",
        key=TIMES_KEY,
        set_by=(TIMES_KEY, *CLUSTER_SOURCES),
        suggestions=INSTEAD,
    )


def _device(name: str) -> str:
    return "CPU cores" if name == CPU else name


def _same(value: object, here: object) -> bool:
    return value == here and isinstance(value, bool) == isinstance(here, bool)


STAGE_FINDERS = (layers_fill_stages, stages_match_mesh, stages_cover_layers, times_fit)
