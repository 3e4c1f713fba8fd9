# SPDX-License-Identifier: Apache-2.0
"""A small model and its data, cut three times: by layers, by matrices, by samples."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.cost.seconds.stages import split_layers
from echelon.page.document import Fact
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.diagram import DiagramFigure, Place, Tile
from echelon.page.lessons.lesson import Frame, Lesson, Scene
from echelon.page.lessons.matrices import mlp_weights

LAYERS = 4  # layers of the model, each of two matrices
HIDDEN = 4  # its width
FFN = 8  # neurons of a layer
SAMPLES = 8  # samples of the batch
MESH = Mesh(pp=2, dp_replicate=2, tp=2)
"""Two of each: eight ranks."""
_KINDS = ("samples", *(f"layer {layer}" for layer in range(LAYERS)))
_CUTS = (Mesh(), Mesh(pp=2), Mesh(pp=2, tp=2), MESH, MESH)
"""The mesh after each step."""
_CAPTIONS = (
    "Step 1: one model of four layers and one batch of eight samples, on one rank.",
    "Step 2, pipeline: cut between layers. The front half is stage 0, the back half stage 1, and "
    "activations go from one to the other.",
    "Step 3, tensor: cut each matrix in two. A rank has half of the weights of each layer of its "
    "stage, and the two halves of a stage sum their activations.",
    "Step 4, data: copy all of it, and give each copy half of the samples. The copies sum "
    "gradients.",
    "Step 5: eight ranks, each with its coordinates. The number of a rank counts tensor places "
    "first, then replicas, then stages.",
)


def baby_steps() -> Lesson:
    """Return the lesson: one cut after the other, until there are eight ranks."""
    return Lesson(
        id="baby-steps",
        topic="Several splits at once",
        title="One model and one batch, cut into a grid of 2 x 2 x 2",
        rows=("M22",),
        summary=(
            "Three cuts, one after the other: layers into stages, matrices into halves, samples "
            "into replicas. Each cut doubles the ranks."
        ),
        source=(
            "the engine's mesh, its cut of layers into stages, and the ranges in which tensor "
            "ranks hold weights"
        ),
        scenes=(Scene(frames=tuple(_frame(step) for step in range(len(_CUTS)))),),
        corrections=corrections("distributed-49"),
    )


def weights_of(mesh: Mesh) -> int:
    """Return how many weights a rank holds under a mesh."""
    specs = mlp_weights(HIDDEN, FFN)
    layers = len(split_layers(LAYERS, mesh.pp)[0])
    return layers * sum(spec.local_numel(mesh.tp) for spec in specs)


def _frame(step: int) -> Frame:
    mesh = _CUTS[step]
    degrees = f"{mesh.dp} x {mesh.tp} x {mesh.pp} = {mesh.world_size}"
    whole = weights_of(Mesh())
    return Frame(
        caption=_CAPTIONS[step],
        figures=(DiagramFigure(kinds=_KINDS, places=_places(mesh, named=step == len(_CUTS) - 1)),),
        facts=(
            Fact(
                name="ranks",
                value=str(mesh.world_size),
                note=f"data x tensor x pipeline, {degrees}",
            ),
            Fact(
                name="weights on a rank",
                value=f"{weights_of(mesh)} of {whole}",
                note=f"{LAYERS} layers of two matrices, [{HIDDEN}, {FFN}] and [{FFN}, {HIDDEN}]",
            ),
            Fact(
                name="samples of a replica",
                value=f"{SAMPLES // mesh.dp} of {SAMPLES}",
                note="the ranks of a replica work on the same samples",
            ),
        ),
    )


def _places(mesh: Mesh, *, named: bool) -> tuple[Place, ...]:
    """Return the samples of each replica, and its ranks with what they hold."""
    places: list[Place] = []
    for dp in range(mesh.dp):
        group = f"replica {dp}" if mesh.dp > 1 else ""
        each = SAMPLES // mesh.dp
        places.append(_data(range(dp * each, (dp + 1) * each), group))
        for pp in range(mesh.pp):
            for tp in range(mesh.tp):
                places.append(_rank(mesh, dp, pp, tp, group, named=named))
    return tuple(places)


def _data(samples: range, group: str) -> Place:
    tiles = tuple(
        Tile(
            id=f"sample {one}",
            label=str(one),
            words=f"sample {one}",
            kind=0,
            row=at // 4,
            column=at % 4,
        )
        for at, one in enumerate(samples)
    )
    return Place(label="samples", note="", tiles=tiles, group=group)


def _rank(mesh: Mesh, dp: int, pp: int, tp: int, group: str, *, named: bool) -> Place:
    rank = mesh.rank({Axis.DP_REPLICATE: dp, Axis.PP: pp, Axis.TP: tp})
    tiles: list[Tile] = []
    for row, layer in enumerate(split_layers(LAYERS, mesh.pp)[pp]):
        halves = range(2) if mesh.tp == 1 else (tp,)
        tiles += [_half(layer, half, dp, row, column) for column, half in enumerate(halves)]
    return Place(
        label=f"rank {rank}" if named else _part(mesh, pp, tp),
        note=f"dp {dp}, tp {tp}, pp {pp}" if named else "",
        tiles=tuple(tiles),
        group=group,
    )


def _part(mesh: Mesh, pp: int, tp: int) -> str:
    parts: Sequence[str] = (
        *((f"stage {pp}",) if mesh.pp > 1 else ()),
        *((f"half {tp}",) if mesh.tp > 1 else ()),
    )
    return ", ".join(parts) or "the model"


def _half(layer: int, half: int, dp: int, row: int, column: int) -> Tile:
    """Return a half of the matrices of a layer; those of the second replica are copies."""
    start, stop = mlp_weights(HIDDEN, FFN)[0].local_range(2, half)
    own = f"layer {layer} half {half}"
    return Tile(
        id=own if dp == 0 else f"{own} copy",
        label=f"L{layer} {start}-{stop - 1}",
        words=f"layer {layer}, neurons {start} to {stop - 1}",
        kind=layer + 1,
        row=row,
        column=column,
        origin="" if dp == 0 else own,
    )
