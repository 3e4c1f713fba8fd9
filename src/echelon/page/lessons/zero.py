# SPDX-License-Identifier: Apache-2.0
"""Shares of model state: bytes of a rank by kind and ZeRO stage, and what sharding is."""

from __future__ import annotations

from echelon.core.messages.plurals import in_singular
from echelon.core.plan import ZeroStage
from echelon.core.units import decimal_bytes, short_count
from echelon.cost.bytes.model_sizes import (
    MIXED_PRECISION,
    STAGES,
    ModelStates,
    communication_volume,
    memory_saving,
    model_states,
    states_formula,
)
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Frame,
    Lesson,
    LessonControl,
    Place,
    Scene,
    Tile,
    choices,
)
from echelon.planner.view.document import BarRow, BarsFigure, DataTable, Fact

SIZES = {"7B": 7e9, "one weight": 1.0}
RANKS = 4  # data ranks, as published guides take them
KINDS = ("parameters", "gradients", "master copy", "first moment", "second moment")
SHOWN = {
    "everything": KINDS,
    "parameters": KINDS[:1],
    "gradients": KINDS[1:2],
    "optimizer state": KINDS[2:],
}
_CONTROLS = (
    LessonControl(name="size", label="bytes of", values=tuple(SIZES)),
    LessonControl(name="shown", label="highlight", values=tuple(SHOWN)),
)
_CUT = (
    "Nothing is shared out: each rank holds all five kinds whole.",
    "Stage 1 shares out optimizer state: the master copy and both moments.",
    "Stage 2 shares out gradients, too.",
    "Stage 3 shares out everything.",
)

WEIGHTS = {"7B": 7e9, "70B": 70e9}
STAGE_RANKS = (1, 2, 4, 8, 64)  # data ranks
_KINDS = ("parameters", "gradients", "optimizer")
_STAGE_CONTROLS = (
    LessonControl(name="weights", label="weights", values=tuple(WEIGHTS)),
    LessonControl(
        name="ranks",
        label="data ranks N",
        values=tuple(map(str, STAGE_RANKS)),
        start=STAGE_RANKS.index(4),
    ),
)
_SHARED = (
    "Every rank holds everything: parameters, gradients and optimizer state.",
    "Stage 1: each rank keeps 1/N of the optimizer state, and updates that share of the weights.",
    "Stage 2: gradients are reduced to the rank whose share they are, and held by it alone.",
    "Stage 3: parameters are shared out, too, and gathered for a layer while it is computed.",
)
SHARDING_WEIGHTS = 7e9  # parameters
LAYERS = 32  # of the model; each is gathered by itself
SHARDING_RANKS = (2, 4, 8)  # data ranks
_SHARDING_KINDS = ("parameters", "one layer, gathered")
_CONTROL = LessonControl(
    name="ranks",
    label="data ranks N",
    values=tuple(map(str, SHARDING_RANKS)),
    start=SHARDING_RANKS.index(4),
)


def zero_breakdown() -> Lesson:
    """Return the lesson: a bar of five kinds for each stage."""
    return Lesson(
        id="zero-breakdown",
        topic="ZeRO",
        title=f"Every byte of a rank, on {RANKS} data ranks",
        rows=("M9", "M14"),
        summary=(
            "A weight takes 2 bytes of parameter, 2 of gradient and 12 of optimizer state. What a "
            "stage shares out is divided by N."
        ),
        source="the formulas of model states that echelon explain zero prints",
        controls=_CONTROLS,
        scenes=tuple(_scene(SIZES[one["size"]], SHOWN[one["shown"]]) for one in choices(_CONTROLS)),
        corrections=corrections(
            "distributed-33",
            "distributed-35",
            "distributed-37",
            "llm-training-20",
            "llm-training-24",
        ),
        commands=(f"echelon explain zero --parameters 7B --dp {RANKS}",),
    )


def held_by_kind(weights: float, stage: ZeroStage) -> tuple[float, ...]:
    """Return the bytes of a rank by the kinds of `KINDS`."""
    held = model_states(weights, stage, RANKS)
    share = held.optimizer / MIXED_PRECISION.optimizer
    moment = MIXED_PRECISION.moments / 2
    parts = share * MIXED_PRECISION.master, share * moment, share * moment
    return held.parameters, held.gradients, *parts


def _scene(weights: float, shown: tuple[str, ...]) -> Scene:
    rows = tuple(
        (
            str(stage),
            *(_cell(weights, stage, value) for value in _three(weights, stage)),
            f"{decimal_bytes(_held(weights, stage).total)} = {states_formula(stage)}",
            f"{memory_saving(stage, RANKS):.2f}x",
        )
        for stage in STAGES
    )
    return Scene(
        frames=tuple(_frame(weights, stage, shown) for stage in STAGES),
        table=DataTable(
            head=("stage", "parameters", "gradients", "optimizer state", "together", "saving"),
            rows=rows,
            right=(1, 2, 3, 5),
        ),
    )


def _frame(weights: float, stage: ZeroStage, shown: tuple[str, ...]) -> Frame:
    held = _held(weights, stage)
    seen = [
        value
        for kind, value in zip(KINDS, held_by_kind(weights, stage), strict=True)
        if kind in shown
    ]
    facts = [
        Fact("a rank holds", _bytes(weights, held.total), f"{states_formula(stage)}, N = {RANKS}"),
        Fact("against stage 0", f"{memory_saving(stage, RANKS):.2f} times less"),
    ]
    if shown != KINDS:
        share = sum(seen) / held.total
        facts.append(Fact("highlighted", _bytes(weights, sum(seen)), _share(share)))
    return Frame(
        caption=_CUT[stage],
        figures=(
            BarsFigure(
                kinds=KINDS,
                limit=0.0,
                limit_text="",
                rows=tuple(_bar(weights, one, shown) for one in STAGES[: stage + 1]),
            ),
        ),
        facts=tuple(facts),
    )


def _bar(weights: float, stage: ZeroStage, shown: tuple[str, ...]) -> BarRow:
    parts = held_by_kind(weights, stage)
    values = tuple(
        value if kind in shown else 0.0 for kind, value in zip(KINDS, parts, strict=True)
    )
    total = sum(values)
    whole = sum(
        value for kind, value in zip(KINDS, held_by_kind(weights, 0), strict=True) if kind in shown
    )
    return BarRow(
        label=f"stage {stage}",
        values=values,
        texts=tuple(_bytes(weights, value) for value in values),
        total=total,
        total_text=_bytes(weights, total),
        share_text=f"{100 * total / whole:.1f} %",
        over=False,
    )


def _held(weights: float, stage: ZeroStage) -> ModelStates:
    return model_states(weights, stage, RANKS)


def _three(weights: float, stage: ZeroStage) -> tuple[float, float, float]:
    held = _held(weights, stage)
    return held.parameters, held.gradients, held.optimizer


def _cell(weights: float, stage: ZeroStage, value: float) -> str:
    cut = value not in _three(weights, 0)
    return f"{_bytes(weights, value)}{f' (1/{RANKS})' if cut else ''}"


def _bytes(weights: float, value: float) -> str:
    return decimal_bytes(value) if weights > 1 else in_singular(f"{value:g} bytes")


def _share(share: float) -> str:
    return f"{100 * share:.1f} % of it"


def zero_stages() -> Lesson:
    """Return the lesson: a bar for each stage, and one frame after the other."""
    return Lesson(
        id="zero-stages",
        topic="ZeRO",
        title="What a rank holds at ZeRO stages 0 to 3",
        rows=("M9", "M15", "E20"),
        summary=(
            "Model state in mixed precision is 16 bytes a weight. Each stage shares out one more "
            "kind of it over N data ranks."
        ),
        source="the formulas of echelon explain and of the planner",
        controls=_STAGE_CONTROLS,
        scenes=tuple(
            _stage_scene(WEIGHTS[chosen["weights"]], int(chosen["ranks"]))
            for chosen in choices(_STAGE_CONTROLS)
        ),
        corrections=corrections("llm-training-04", "llm-training-05", "llm-training-06"),
    )


def _stage_scene(weights: float, ranks: int) -> Scene:
    frames = tuple(_stage_frame(weights, ranks, stage) for stage in STAGES)
    rows = [
        (str(stage), states_formula(stage), *map(decimal_bytes, _stage_held(weights, ranks, stage)))
        for stage in STAGES
    ]
    return Scene(
        frames=frames,
        table=DataTable(
            head=("stage", "bytes", *_KINDS), rows=tuple(rows), right=tuple(range(2, 5))
        ),
    )


def _stage_frame(weights: float, ranks: int, stage: ZeroStage) -> Frame:
    shown = STAGES[: stage + 1]
    total = sum(_stage_held(weights, ranks, stage))
    sent = communication_volume(stage).sent_bytes(weights, ranks, MIXED_PRECISION.parameters)
    return Frame(
        caption=_SHARED[stage],
        figures=(
            BarsFigure(
                kinds=_KINDS,
                limit=0.0,
                limit_text="",
                rows=tuple(_stage_bar(weights, ranks, one) for one in shown),
            ),
        ),
        facts=(
            Fact("a rank holds", decimal_bytes(total), states_formula(stage)),
            Fact(
                "a rank sends in a step",
                decimal_bytes(sent),
                f"{communication_volume(stage).multiples} (N-1)/N psi, 2 bytes a weight",
            ),
        ),
    )


def _stage_bar(weights: float, ranks: int, stage: ZeroStage) -> BarRow:
    held = _stage_held(weights, ranks, stage)
    whole = MIXED_PRECISION.total * weights
    return BarRow(
        label=f"stage {stage}",
        values=held,
        texts=tuple(map(decimal_bytes, held)),
        total=sum(held),
        total_text=decimal_bytes(sum(held)),
        share_text=f"{100 * sum(held) / whole:.1f} %",
        over=False,
    )


def _stage_held(weights: float, ranks: int, stage: ZeroStage) -> tuple[float, ...]:
    states = model_states(weights, stage, ranks)
    return states.parameters, states.gradients, states.optimizer


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
        scenes=tuple(_sharding_scene(int(one["ranks"])) for one in choices((_CONTROL,))),
        corrections=corrections("llm-training-16", "llm-training-07"),
        commands=("echelon explain zero --parameters 7B --dp 4",),
    )


def parameters_of_rank(ranks: int, stage: ZeroStage) -> float:
    """Return how many parameters a rank stores at a stage of ZeRO."""
    return model_states(SHARDING_WEIGHTS, stage, ranks).parameters / MIXED_PRECISION.parameters


def _sharding_scene(ranks: int) -> Scene:
    copies, shards = (ranks * parameters_of_rank(ranks, stage) for stage in (0, 3))
    rows = tuple(
        (name, short_count(total / ranks), short_count(total), f"{total / SHARDING_WEIGHTS:g}x")
        for name, total in (("copies", copies), ("shards", shards))
    )
    return Scene(
        frames=(_copied(ranks), _sharded(ranks), _gathered(ranks), _freed(ranks)),
        table=DataTable.of(("", "a rank stores", "all ranks store", "of the model"), rows),
    )


def _copied(ranks: int) -> Frame:
    stored = ranks * parameters_of_rank(ranks, 0)
    again = stored - SHARDING_WEIGHTS
    return Frame(
        caption=(
            f"Without sharding each of {ranks} ranks stores all "
            f"{short_count(SHARDING_WEIGHTS)} parameters."
        ),
        figures=(_figure(ranks, sharded=False),),
        facts=(
            Fact(
                "all ranks store", short_count(stored), f"{ranks} x {short_count(SHARDING_WEIGHTS)}"
            ),
            Fact("stored again", short_count(again), f"{again / SHARDING_WEIGHTS:g} x the model"),
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
            Fact("all ranks store", short_count(ranks * each), f"{ranks} x {short_count(each)}"),
            Fact("stored again", short_count(ranks * each - SHARDING_WEIGHTS)),
        ),
    )


def _gathered(ranks: int) -> Frame:
    layer = SHARDING_WEIGHTS / LAYERS
    each = parameters_of_rank(ranks, 3)
    return Frame(
        caption=(
            "A layer needs all of its parameters: before it runs, an all-gather brings the parts "
            "of that one layer together on each rank."
        ),
        figures=(_figure(ranks, sharded=True, gathered=True),),
        facts=(
            Fact("one layer, whole", short_count(layer), f"1/{LAYERS} of the model"),
            Fact(
                "a rank has in memory",
                short_count(each + layer),
                f"its shard of {short_count(each)}, and the layer",
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
        facts=(Fact("a rank has in memory", short_count(each)),),
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
    return DiagramFigure(kinds=_SHARDING_KINDS, places=tuple(places))
