# SPDX-License-Identifier: Apache-2.0
"""What sharding is: parameters stored again on each rank, or once over all of them."""

from __future__ import annotations

from echelon.core.plan import ZeroStage
from echelon.core.units import short_count
from echelon.cost.bytes.model_sizes import MIXED_PRECISION, model_states
from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.diagram import DiagramFigure, Place, Tile
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene, choices

WEIGHTS = 7e9  # parameters
LAYERS = 32  # of the model; each is gathered by itself
RANKS = (2, 4, 8)  # data ranks
_KINDS = ("parameters", "one layer, gathered")
_CONTROL = LessonControl(
    name="ranks", label="data ranks N", values=tuple(map(str, RANKS)), start=RANKS.index(4)
)


def sharding() -> Lesson:
    """Return the lesson: copies, shards, and a layer that is gathered and freed."""
    return Lesson(
        id="sharding",
        topic="ZeRO",
        title="Sharding: stored once, over all ranks",
        rows=("M13",),
        summary=(
            "Data ranks that copy a model store every parameter N times. Shards store it once: "
            "each rank has 1/N, and a layer is made whole only while it is used."
        ),
        source="the formulas of model states that echelon explain zero prints",
        controls=(_CONTROL,),
        scenes=tuple(_scene(int(one["ranks"])) for one in choices((_CONTROL,))),
        corrections=corrections("llm-training-16", "llm-training-07"),
        commands=("echelon explain zero --parameters 7B --dp 4",),
    )


def parameters_of_rank(ranks: int, stage: ZeroStage) -> float:
    """Return how many parameters a rank stores at a stage of ZeRO."""
    return model_states(WEIGHTS, stage, ranks).parameters / MIXED_PRECISION.parameters


def _scene(ranks: int) -> Scene:
    copies, shards = (ranks * parameters_of_rank(ranks, stage) for stage in (0, 3))
    rows = tuple(
        (name, short_count(total / ranks), short_count(total), f"{total / WEIGHTS:g}x")
        for name, total in (("copies", copies), ("shards", shards))
    )
    return Scene(
        frames=(_copied(ranks), _sharded(ranks), _gathered(ranks), _freed(ranks)),
        table=DataTable(
            head=("", "a rank stores", "all ranks store", "of the model"),
            rows=rows,
            right=(1, 2, 3),
        ),
    )


def _copied(ranks: int) -> Frame:
    stored = ranks * parameters_of_rank(ranks, 0)
    again = stored - WEIGHTS
    return Frame(
        caption=(
            f"Without sharding each of {ranks} ranks stores all {short_count(WEIGHTS)} parameters."
        ),
        figures=(_figure(ranks, sharded=False),),
        facts=(
            Fact(
                name="all ranks store",
                value=short_count(stored),
                note=f"{ranks} x {short_count(WEIGHTS)}",
            ),
            Fact(
                name="stored again",
                value=short_count(again),
                note=f"{again / WEIGHTS:g} x the model",
            ),
        ),
    )


def _sharded(ranks: int) -> Frame:
    each = parameters_of_rank(ranks, 3)
    return Frame(
        caption=(
            f"Sharded, rank i stores the i-th of {ranks} equal parts, and nobody stores it again."
        ),
        figures=(_figure(ranks, sharded=True),),
        facts=(
            Fact(
                name="all ranks store",
                value=short_count(ranks * each),
                note=f"{ranks} x {short_count(each)}",
            ),
            Fact(name="stored again", value=short_count(ranks * each - WEIGHTS)),
        ),
    )


def _gathered(ranks: int) -> Frame:
    layer = WEIGHTS / LAYERS
    each = parameters_of_rank(ranks, 3)
    return Frame(
        caption=(
            "A layer needs all of its parameters: before it runs, an all-gather brings the parts "
            "of that one layer together on each rank."
        ),
        figures=(_figure(ranks, sharded=True, gathered=True),),
        facts=(
            Fact(
                name="one layer, whole",
                value=short_count(layer),
                note=f"1/{LAYERS} of the model",
            ),
            Fact(
                name="a rank has in memory",
                value=short_count(each + layer),
                note=f"its shard of {short_count(each)}, and the layer",
            ),
        ),
    )


def _freed(ranks: int) -> Frame:
    each = parameters_of_rank(ranks, 3)
    return Frame(
        caption=(
            "When the layer has run, the gathered copy is freed, and the next layer is gathered. "
            "Backward gathers each layer once more."
        ),
        figures=(_figure(ranks, sharded=True),),
        facts=(Fact(name="a rank has in memory", value=short_count(each)),),
    )


def _figure(ranks: int, *, sharded: bool, gathered: bool = False) -> DiagramFigure:
    each = parameters_of_rank(ranks, 3 if sharded else 0)
    places: list[Place] = []
    for rank in range(ranks):
        first = rank * each if sharded else 0.0
        part = f"parameters {short_count(first)} to {short_count(first + each)}"
        tiles = [
            Tile(
                id=f"rank {rank}",
                label=f"1/{ranks}" if sharded else short_count(each),
                words=f"{short_count(each)}: {part}",
                kind=0,
                column=rank if sharded else 0,
                columns=1 if sharded else ranks,
            )
        ]
        if gathered:
            tiles.append(
                Tile(
                    id=f"layer {rank}",
                    label="layer",
                    words=f"one layer, whole on rank {rank}",
                    kind=1,
                    row=1,
                    columns=ranks,
                )
            )
        places.append(Place(label=f"rank {rank}", note=part, tiles=tuple(tiles)))
    return DiagramFigure(kinds=_KINDS, places=tuple(places))
