"""What must hold between stages and blocks: each block once, in order, and a list per stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.config.pipeline import STAGES_KEY, num_stages, stages_per_rank
from echelon.config.pipeline_works import placements_that_work, settings_that_work
from echelon.config.view import View
from echelon.core.errors import Problem
from echelon.core.rulebook.pipeline import (
    LAYERS_FILL_STAGES,
    STAGES_COVER_LAYERS,
    STAGES_MATCH_MESH,
)
from echelon.schedule.plan_problems import uncovered

MOST_LISTED = 16


def layers_fill_stages(view: View) -> Iterator[Problem]:
    """Check that every stage gets a block, unless somebody says which ones do not."""
    if view.stage_lists() is not None:
        return
    stages, layers = num_stages(view), view.integer("model.layers")
    if layers < stages:
        virtual = stages_per_rank(view)
        works = placements_that_work(view)
        if stages <= MOST_LISTED:
            listed: list[list[int]] = [[layer] if layer < layers else [] for layer in range(stages)]
            works += settings_that_work(view, [{STAGES_KEY: listed}])
        product = f"mesh.pp = {view.integer('mesh.pp')}"
        product += f" x {virtual} stages on each rank" if virtual > 1 else ""
        yield LAYERS_FILL_STAGES.problem(
            f"{product} makes {stages} stages, but {view.model_name} has {layers} blocks",
            key="mesh.pp",
            set_by=view.set_by("mesh.pp", "model.layers"),
            works=works,
        )


def stages_match_mesh(view: View) -> Iterator[Problem]:
    """Check that there is one explicit list for each stage."""
    stages = view.stage_lists()
    if stages is not None and len(stages) != num_stages(view):
        yield STAGES_MATCH_MESH.problem(
            f"{STAGES_KEY} lists {len(stages)} stages, but pp x virtual_stages = "
            f"{view.integer('mesh.pp')} x {stages_per_rank(view)} = {num_stages(view)}",
            key=STAGES_KEY,
            set_by=view.set_by(STAGES_KEY, "mesh.pp"),
            works=("one list for each stage", *_left_to_us(view)),
        )


def stages_cover_layers(view: View) -> Iterator[Problem]:
    """Check that explicit stages hold each block once, in order; a stage may be empty."""
    stages = view.stage_lists()
    if stages is None:
        return
    layers = view.integer("model.layers")
    faults = uncovered(stages, layers)
    if faults:
        yield STAGES_COVER_LAYERS.problem(
            f"{STAGES_KEY}: {'; '.join(faults)}",
            key=STAGES_KEY,
            set_by=view.set_by(STAGES_KEY),
            works=(*_mended(view, stages, layers), *_left_to_us(view)),
        )


def _left_to_us(view: View) -> list[str]:
    return settings_that_work(view, [{STAGES_KEY: "auto"}])


def _mended(view: View, stages: Sequence[Sequence[int]], layers: int) -> list[str]:
    """Return the lists with as many blocks as they have, in order, the last taking what is left."""
    if not stages or layers > 4 * MOST_LISTED:
        return []
    ends = [min(layers, sum(map(len, stages[: s + 1]))) for s in range(len(stages))]
    ends[-1] = layers
    found = [list(range(a, b)) for a, b in zip((0, *ends), ends, strict=False)]
    return settings_that_work(view, [{STAGES_KEY: found}])


STAGE_CHECKS = (layers_fill_stages, stages_match_mesh, stages_cover_layers)
