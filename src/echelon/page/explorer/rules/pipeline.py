# SPDX-License-Identifier: Apache-2.0
"""What a schedule needs of ranks, stages and microbatches, and stages of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.pipeline import (
    LAYERS_FILL_STAGES,
    SCHEDULE_EVEN_MICROBATCHES,
    SCHEDULE_EVEN_RANKS,
    SCHEDULE_NEEDS_MICROBATCHES,
    SCHEDULE_STAGES_PER_RANK,
)
from echelon.page.explorer.controls import Controls, Record
from echelon.page.explorer.rules.broken import Broken, rest_text


def broken_by_pipeline(tables: Record, controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield what the schedule and its stages break."""
    pp, virtual = controls.pp, controls.virtual
    share = controls.microbatch * controls.dp_replicate * controls.dp_shard
    # Of a batch that does not come out even nothing is said of its microbatches.
    if controls.sequences % share == 0:
        yield from _schedule(tables, controls, controls.sequences // share)
    if shape.layers < pp * virtual:
        yield Broken(
            rule=LAYERS_FILL_STAGES.id,
            message=f"pp x stages of a rank = {pp} x {virtual} = {pp * virtual} stages, but the "
            f"model has {shape.layers} blocks",
        )


def _schedule(tables: Record, controls: Controls, count: int) -> Iterator[Broken]:
    pp, virtual, name = controls.pp, controls.virtual, controls.schedule
    facts: Any = tables["schedule_facts"][name]
    if facts["even_ranks"] and pp % 2:
        yield Broken(
            rule=SCHEDULE_EVEN_RANKS.id,
            message=f"{name} pairs each rank with its mirror image, but pp = {pp} is odd",
        )
    elif virtual >= len(facts["virtual"]) or not facts["virtual"][virtual]:
        yield Broken(
            rule=SCHEDULE_STAGES_PER_RANK.id,
            message=f"{name} places {facts['places']}, but there are {pp * virtual} stages for "
            f"{pp} ranks",
        )
    multiple = facts["multiple"]
    least = max(1, facts["per_rank"] * pp)
    if count < least:
        yield Broken(
            rule=SCHEDULE_NEEDS_MICROBATCHES.id,
            message=f"{name} needs at least {least} microbatches on {pp} ranks, but a step has "
            f"{count}",
        )
    elif count % multiple:
        yield Broken(
            rule=SCHEDULE_EVEN_MICROBATCHES.id,
            message=f"{name} lets half of the microbatches enter at each end, but a step has "
            f"{count} ({rest_text(count, multiple)})",
        )
