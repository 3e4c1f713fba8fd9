# SPDX-License-Identifier: Apache-2.0
"""What published guides say to the model, the batch and the cluster of the controls.

Compiled for the page with the trees, the size guide and their questions (`handbook/guides/`): what
is here are the facts that these ask for, from the controls and the tables. Of a run file of the
controls `echelon explain choose` walks the same ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.cluster import Link
from echelon.core.plan import RecomputePolicy
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.seconds.from_plan import model_numbers_from_shape
from echelon.handbook.guides.practices import SIZE_GUIDE, rows_for
from echelon.handbook.guides.situation import Situation
from echelon.handbook.guides.strategy import Strategy
from echelon.handbook.guides.trees import TREES
from echelon.page.explorer.controls import PRECISIONS, Controls, Record
from echelon.planner.predict.split_memory import (
    GuideSplit,
    bytes_of_weight,
    guide_constants,
    layout_of_split,
)
from web.formulas.inputs import machine_numbers, model_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlsSituation(Situation):
    """Show what a guide may ask about of the controls, as `PlanSituation` does of their plan."""

    tables: Record
    controls: Controls
    preset: Record
    place: Record

    def inputs(self, split: GuideSplit, recompute: RecomputePolicy | None) -> CostInputs:
        """Return what the formulas read of a split: guides know one dtype, and no kernels."""
        controls = self.controls
        precision = PRECISIONS[controls.precision]
        layout = layout_of_split(
            split,
            global_sequences=controls.sequences,
            microbatch_sequences=controls.microbatch,
            recompute=recompute or controls.recompute,
        )
        machine = machine_numbers(self.tables, controls, self.preset, self.place)
        return CostInputs(
            model=model_numbers_from_shape(self.model, controls.length, tp=layout.tp),
            machine=replace(machine, attention_flops=machine.peak_flops),
            software=guide_constants(precision, controls.optimizer, gpus=self.place["gpus"]),
            layout=layout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideStep:
    """Hold a question on the way through a tree, and its answer by the controls' numbers."""

    question: str
    yes: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideWay:
    """Hold what one guide says: the way there, what it allows, what the controls do otherwise.

    A row of the size guide has no steps, but a note: the corner at which it is known to fail.
    """

    id: str
    source: str
    title: str
    steps: tuple[GuideStep, ...]
    strategy: str
    says: str
    differs: tuple[str, ...]
    note: str


def guide_ways(
    tables: Record, controls: Controls, model: Record, cluster: Record
) -> list[GuideWay]:
    """Return the way through each tree, then the rows of the size guide that cover the controls."""
    situation = ControlsSituation(
        tables=tables,
        controls=controls,
        preset=model,
        place=cluster,
        model=model_shape(model["shape"]),
        num_parameters=model["parameters"],
        largest_block=model["largest_block"],
        precision=bytes_of_weight(PRECISIONS[controls.precision], controls.optimizer),
        global_sequences=controls.sequences,
        microbatch_sequences=controls.microbatch,
        positions=controls.length,
        memory=cluster["memory_bytes"],
        nodes=cluster["nodes"],
        devices_per_node=cluster["devices_per_node"],
        domain=cluster["fast_domain"],
        links=tuple(
            Link(
                name=link["name"],
                degree=link["degree"],
                bandwidth=link["bandwidth"],
                latency_s=link["latency_s"],
            )
            for link in cluster["links"]
        ),
    )
    found: list[GuideWay] = []
    for tree in TREES:
        steps, strategy = tree.walk(situation)
        found.append(
            GuideWay(
                id=tree.id,
                source=tree.source,
                title=tree.title,
                steps=tuple(
                    GuideStep(question=node.question.text, yes=answer.yes, why=answer.why)
                    for node, answer in steps
                ),
                strategy=strategy.name,
                says=strategy.says(),
                differs=_otherwise(strategy, controls),
                note=f"ours: {tree.ours}",
            )
        )
    for row in rows_for(situation):
        found.append(
            GuideWay(
                id=row.id,
                source=SIZE_GUIDE,
                title=row.strategy.name,
                steps=(),
                strategy=row.strategy.name,
                says=row.strategy.says(),
                differs=_otherwise(row.strategy, controls),
                note=f"known corner: {row.corner}",
            )
        )
    return found


def _otherwise(strategy: Strategy, controls: Controls) -> tuple[str, ...]:
    degrees = {"tp": controls.tp, "pp": controls.pp, "cp": controls.cp, "ep": controls.ep}
    several = controls.dp_replicate * controls.dp_shard > 1
    return strategy.differs(degrees, controls.zero if several else None)
