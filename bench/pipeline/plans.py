"""The plan of a pipeline case: that of its mode, with the schedule and split of its variant."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from bench.harness.catalogue import Case
from bench.harness.plans import bench_plan
from bench.harness.spec import Settings
from bench.pipeline.spec import PipelineVariant, pipeline_mode
from echelon.core.plan import Pipeline, Plan
from echelon.cost.seconds.stages import split_layers


def pipeline_plan(settings: Settings) -> Plan:
    """Return the plan of one rank's settings; every rank of a case has the same."""
    variant = PipelineVariant.parse(settings.variant)
    plan = bench_plan(settings)
    pipeline = Pipeline(
        schedule=variant.schedule,
        virtual_stages=variant.per_rank,
        stages=variant.stages
        or split_layers(settings.size.layers, settings.mode.pp * variant.per_rank),
        rows=variant.rows,
    )
    return replace(plan, layout=replace(plan.layout, pipeline=pipeline))


def our_case(label: str, variant: PipelineVariant) -> Case:
    """Return Echelon with a schedule and split, in the environment that runs this."""
    return Case(
        label=label,
        module="bench.pipeline.case",
        variant=str(variant),
        mode=pipeline_mode(f"pp2-{variant.schedule}"),
        python=Path(sys.executable),
    )
