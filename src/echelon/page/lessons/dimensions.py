# SPDX-License-Identifier: Apache-2.0
"""Three dimensions of a split (batch, matrices, layers): side by side, then one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.axis import Axis
from echelon.core.mesh import Mesh
from echelon.core.plan import DTYPE_BYTES
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import communication_volume, tensor_message_bytes
from echelon.cost.bytes.terms import all_reduce_bytes
from echelon.cost.seconds.stages import split_layers
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
from echelon.page.lessons.matrices import mlp_weights
from echelon.planner.view.document import DataTable, Fact

SAMPLES = 32  # samples of a step
LAYERS = 32  # layers of the model
HIDDEN = 4096  # its width
FFN = 16384  # the inner width of its MLPs
WEIGHTS = 7e9  # about what such a model has
LENGTH = 2048  # tokens of a sample
BYTES = DTYPE_BYTES["bf16"]
_KINDS = ("samples", "columns of each matrix", "layers")
_CONTROLS = (LessonControl(name="ranks", label="ranks N", values=("2", "4"), start=1),)

STEP_LAYERS = 4  # layers of the model, each of two matrices
STEP_HIDDEN = 4  # its width
STEP_FFN = 8  # neurons of a layer
STEP_SAMPLES = 8  # samples of the batch
MESH = Mesh(pp=2, dp_replicate=2, tp=2)
"""Two of each: eight ranks."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Say what one way of splitting cuts, when it sends, and how much a rank sends in a step."""

    name: str
    caption: str
    when: str
    what: str
    sent: float


def ways(degree: int) -> tuple[Way, Way, Way]:
    """Return the three ways for so many ranks, with the bytes of a step of 32 samples.

    Of a pipeline it is what a rank between two others sends: activations on, gradients back.
    """
    boundary = SAMPLES * LENGTH * HIDDEN * BYTES
    sums = tensor_message_bytes(LAYERS, SAMPLES, LENGTH, HIDDEN)
    return (
        Way(
            name="data parallel",
            caption="Data parallelism cuts the batch. Every rank has the whole model, and sums "
            "gradients with the others once a step.",
            when="once a step",
            what="all-reduce of gradients",
            sent=communication_volume(0).sent_bytes(WEIGHTS, degree, BYTES),
        ),
        Way(
            name="tensor parallel",
            caption="Tensor parallelism cuts each matrix. Every rank sees all samples and all "
            "layers, and the ranks sum activations in each layer.",
            when="twice a layer forward, twice backward",
            what="all-reduce of activations",
            sent=2 * all_reduce_bytes(sums, degree),
        ),
        Way(
            name="pipeline parallel",
            caption="Pipeline parallelism cuts between layers. A rank hands the activations of a "
            "sample to the next one, and gets their gradient back.",
            when="at each boundary of stages, both ways",
            what="sends between neighbours" if degree > 2 else "a send to the other rank",
            sent=min(2, degree - 1) * boundary,
        ),
    )


def three_dimensions() -> Lesson:
    """Return the lesson: what a rank has, by each way."""
    return Lesson(
        id="three-dimensions",
        topic="Three ways to split",
        title="The batch, each matrix, or the layers",
        rows=("M1",),
        summary=(
            "The same model and the same 32 samples on N ranks, cut in three ways. What is cut "
            "decides what a rank holds and what it has to send."
        ),
        source=(
            "the engine's table of parameters and its cut of layers into stages; bytes by the "
            "formulas of the planner, for 7 billion weights and samples of 2,048 tokens in bf16"
        ),
        controls=_CONTROLS,
        scenes=tuple(_scene(int(one["ranks"])) for one in choices(_CONTROLS)),
        corrections=corrections(
            "distributed-03", "distributed-05", "distributed-06", "distributed-09"
        ),
    )


def _scene(degree: int) -> Scene:
    found = ways(degree)
    rows = [(one.name, one.what, one.when, decimal_bytes(one.sent)) for one in found]
    return Scene(
        frames=tuple(_frame(place, one, degree) for place, one in enumerate(found)),
        table=DataTable.of(("way", "sent", "when", "a rank in a step"), rows),
    )


def _frame(cut: int, way: Way, degree: int) -> Frame:
    held = {
        0: ("all weights", f"{SAMPLES // degree} of {SAMPLES} samples"),
        1: (f"1/{degree} of each matrix", "norms and some biases are whole"),
        2: (f"{LAYERS // degree} of {LAYERS} layers", "the ends have embedding and head, too"),
    }
    return Frame(
        caption=way.caption,
        figures=(
            DiagramFigure(
                kinds=_KINDS, places=tuple(_rank(cut, rank, degree) for rank in range(degree))
            ),
        ),
        facts=(
            Fact("a rank holds", held[cut][0], held[cut][1]),
            Fact("a rank sends in a step", decimal_bytes(way.sent), f"{way.what}, {way.when}"),
        ),
    )


def samples_of(rank: int, degree: int) -> range:
    """Return the samples of a batch that a data rank reads: neighbours."""
    each = SAMPLES // degree
    return range(rank * each, (rank + 1) * each)


def _rank(cut: int, rank: int, degree: int) -> Place:
    """Return what a rank has: a row for each kind, in N parts, of which one is cut."""
    tiles = tuple(
        _part(cut, rank, kind, part, degree) for kind in range(3) for part in range(degree)
    )
    return Place(label=f"rank {rank}", note=f"cut: {_KINDS[cut]}", tiles=tiles)


def _part(cut: int, rank: int, kind: int, part: int, degree: int) -> Tile:
    """Return one of N parts of the samples, of each matrix, or of the layers."""
    layers = split_layers(LAYERS, degree)[part]
    samples = samples_of(part, degree)
    start, stop = mlp_weights(HIDDEN, FFN)[0].local_range(degree, part)
    labels = (f"{samples[0]}-{samples[-1]}", f"A{part}", f"{layers[0]}-{layers[-1]}")
    words = (
        f"samples {samples[0]} to {samples[-1]}",
        f"columns {start} to {stop - 1} of a matrix [{HIDDEN}, {FFN}]",
        f"layers {layers[0]} to {layers[-1]}",
    )
    here = kind != cut or part == rank
    return Tile(
        id=f"{rank}-{kind}-{part}",
        label=labels[kind],
        words=words[kind] if here else f"{words[kind]}: on rank {part}",
        kind=kind,
        state="whole" if here else "gone",
        row=kind,
        column=part,
    )


_STEP_KINDS = ("samples", *(f"layer {layer}" for layer in range(STEP_LAYERS)))


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
        scenes=(Scene(frames=tuple(_step_frame(step) for step in range(len(_CUTS)))),),
        corrections=corrections("distributed-49"),
    )


def weights_of(mesh: Mesh) -> int:
    """Return how many weights a rank holds under a mesh."""
    specs = mlp_weights(STEP_HIDDEN, STEP_FFN)
    layers = len(split_layers(STEP_LAYERS, mesh.pp)[0])
    return layers * sum(spec.local_numel(mesh.tp) for spec in specs)


def _step_frame(step: int) -> Frame:
    mesh = _CUTS[step]
    degrees = f"{mesh.dp} x {mesh.tp} x {mesh.pp} = {mesh.world_size}"
    whole = weights_of(Mesh())
    return Frame(
        caption=_CAPTIONS[step],
        figures=(
            DiagramFigure(kinds=_STEP_KINDS, places=_places(mesh, named=step == len(_CUTS) - 1)),
        ),
        facts=(
            Fact("ranks", str(mesh.world_size), f"data x tensor x pipeline, {degrees}"),
            Fact(
                "weights on a rank",
                f"{weights_of(mesh)} of {whole}",
                f"{STEP_LAYERS} layers of two matrices, [{STEP_HIDDEN}, {STEP_FFN}] and "
                f"[{STEP_FFN}, {STEP_HIDDEN}]",
            ),
            Fact(
                "samples of a replica",
                f"{STEP_SAMPLES // mesh.dp} of {STEP_SAMPLES}",
                "the ranks of a replica work on the same samples",
            ),
        ),
    )


def _places(mesh: Mesh, *, named: bool) -> tuple[Place, ...]:
    """Return the samples of each replica, and its ranks with what they hold."""
    places: list[Place] = []
    for dp in range(mesh.dp):
        group = f"replica {dp}" if mesh.dp > 1 else ""
        each = STEP_SAMPLES // mesh.dp
        places.append(_data(range(dp * each, (dp + 1) * each), group))
        for pp in range(mesh.pp):
            for tp in range(mesh.tp):
                places.append(_step_rank(mesh, dp, pp, tp, group, named=named))
    return tuple(places)


def _data(samples: range, group: str) -> Place:
    tiles = tuple(
        Tile(f"sample {one}", str(one), f"sample {one}", 0, row=at // 4, column=at % 4)
        for at, one in enumerate(samples)
    )
    return Place(label="samples", note="", tiles=tiles, group=group)


def _step_rank(mesh: Mesh, dp: int, pp: int, tp: int, group: str, *, named: bool) -> Place:
    rank = mesh.rank({Axis.DP_REPLICATE: dp, Axis.PP: pp, Axis.TP: tp})
    tiles: list[Tile] = []
    for row, layer in enumerate(split_layers(STEP_LAYERS, mesh.pp)[pp]):
        halves = range(2) if mesh.tp == 1 else (tp,)
        tiles += [_half(layer, half, dp, row, column) for column, half in enumerate(halves)]
    return Place(
        label=f"rank {rank}" if named else _step_part(mesh, pp, tp),
        note=f"dp {dp}, tp {tp}, pp {pp}" if named else "",
        tiles=tuple(tiles),
        group=group,
    )


def _step_part(mesh: Mesh, pp: int, tp: int) -> str:
    parts: Sequence[str] = (
        *((f"stage {pp}",) if mesh.pp > 1 else ()),
        *((f"half {tp}",) if mesh.tp > 1 else ()),
    )
    return ", ".join(parts) or "the model"


def _half(layer: int, half: int, dp: int, row: int, column: int) -> Tile:
    """Return a half of the matrices of a layer; those of the second replica are copies."""
    start, stop = mlp_weights(STEP_HIDDEN, STEP_FFN)[0].local_range(2, half)
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
