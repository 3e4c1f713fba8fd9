# SPDX-License-Identifier: Apache-2.0
"""A model of 32 blocks, cut into consecutive stages: who holds which blocks, and what is sent."""

from __future__ import annotations

from itertools import pairwise

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan
from echelon.core.units import decimal_bytes, short_count
from echelon.cost.bytes.sent import bytes_sent
from echelon.layout.stage import RankPart, held_parameters, rank_part
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Frame,
    Lesson,
    LessonControl,
    Move,
    Place,
    Scene,
    Tile,
    choices,
)
from echelon.planner.view.document import DataTable, Fact

MODEL = "llama2-7b"
RANKS = (4, 8)  # pipeline ranks
COLUMNS = 4
"""Blocks in a row of a stage; the whole model has twice as many."""

_KINDS = ("block", "embedding", "head")
_CONTROL = LessonControl(name="p", label="pipeline ranks p", values=tuple(map(str, RANKS)))


def pipeline_stages() -> Lesson:
    """Return the lesson: the whole model, then its stages."""
    return Lesson(
        id="pipeline-stages",
        topic="Pipeline parallel",
        title="A model cut into consecutive stages",
        rows=("M17",),
        summary=(
            "Each rank holds some consecutive blocks. Activations go from a stage to the next, "
            "gradients the same way back: two messages a boundary and microbatch."
        ),
        source="the stages of a plan, and the bytes that its formulas say a rank sends",
        controls=(_CONTROL,),
        scenes=tuple(_scene(stage_plan(int(one["p"]))) for one in choices((_CONTROL,))),
        corrections=corrections("llm-training-34", "llm-training-74"),
        commands=(f"echelon plan {MODEL} --set cluster.preset=8xh100 --set mesh.pp=4",),
    )


def stage_plan(ranks: int) -> Plan:
    """Return the plan of the model over so many pipeline ranks, one replica."""
    sets = (f"cluster.preset={ranks}xh100", f"mesh.pp={ranks}", "batch.global_sequences=16")
    return load_job(MODEL, sets).plan


def _scene(plan: Plan) -> Scene:
    parts = [rank_part(plan, rank) for rank in range(plan.mesh.pp)]
    weights = [sum(spec.numel for spec in held_parameters(plan, part)) for part in parts]
    whole = num_parameters(plan.model)
    table = DataTable.of(
        ("rank", "blocks", "weights", "share"),
        [
            (str(part.pp_rank), _blocks(part), short_count(count), f"{100 * count / whole:.2f} %")
            for part, count in zip(parts, weights, strict=True)
        ],
    )
    return Scene(frames=(_uncut(plan), _cut(plan, parts, weights)), table=table)


def _uncut(plan: Plan) -> Frame:
    layers = plan.model.layers
    place = Place(
        label="one device",
        note=f"{layers} blocks",
        tiles=_tiles(range(layers), True, True, columns=2 * COLUMNS),
    )
    whole = num_parameters(plan.model)
    return Frame(
        caption=(
            f"{plan.model.name} is one chain: an embedding, {layers} blocks and a head. A token "
            "goes through all of them in turn."
        ),
        figures=(DiagramFigure(kinds=_KINDS, places=(place,)),),
        facts=(Fact("weights of one device", short_count(whole)),),
    )


def _cut(plan: Plan, parts: list[RankPart], weights: list[int]) -> Frame:
    whole, ranks = num_parameters(plan.model), len(parts)
    places = tuple(
        Place(
            label=f"rank {part.pp_rank}",
            note=f"{_blocks(part)}: {short_count(count)} weights",
            tiles=_tiles(part.blocks, part.first, part.last),
        )
        for part, count in zip(parts, weights, strict=True)
    )
    moves = tuple(
        Move(
            f"block {one.blocks[-1]}",
            f"block {next_one.blocks[0]}",
            f"Rank {one.pp_rank} sends activations of each microbatch to rank "
            f"{next_one.pp_rank}, and gets their gradients back.",
        )
        for one, next_one in pairwise(parts)
    )
    sent = bytes_sent(plan, 0)
    boundary = sum(term.bytes for term in sent if term.axis == Axis.PP)
    return Frame(
        caption=(
            f"Cut into {ranks} stages. The embedding stays with the first, the head with the last "
            f"one, so the ends are heavier. A microbatch crosses {ranks - 1} boundaries on its way."
        ),
        figures=(DiagramFigure(kinds=_KINDS, places=places, moves=moves),),
        facts=(
            Fact(
                "weights of the fullest rank",
                short_count(max(weights)),
                f"{100 * max(weights) / whole:.2f} % of {short_count(whole)}",
            ),
            Fact("messages of a microbatch, forward", str(ranks - 1)),
            Fact(
                "rank 0 sends in a step",
                decimal_bytes(boundary),
                f"{plan.num_microbatches} microbatches",
            ),
        ),
    )


def _tiles(
    blocks: range | tuple[int, ...], first: bool, last: bool, *, columns: int = COLUMNS
) -> tuple[Tile, ...]:
    """Return blocks in rows, the embedding in a row above them, the head in one below."""
    rows = -(-len(blocks) // columns)
    tiles = [
        Tile(
            id=f"block {block}",
            label=str(block),
            words=f"block {block}",
            kind=0,
            row=1 + at // columns,
            column=at % columns,
        )
        for at, block in enumerate(blocks)
    ]
    ends = (("embedding", "embedding", 1, 0, first), ("head", "head", 2, 1 + rows, last))
    tiles += [
        Tile(name, label, name, kind, row=row, columns=columns)
        for name, label, kind, row, there in ends
        if there
    ]
    return tuple(sorted(tiles, key=lambda tile: (tile.row, tile.column)))


def _blocks(part: RankPart) -> str:
    return f"blocks {part.blocks[0]} to {part.blocks[-1]}"
