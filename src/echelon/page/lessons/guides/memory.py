# SPDX-License-Identifier: Apache-2.0
"""How parameters become gigabytes, and how weights are stored and can be shared out."""

from __future__ import annotations

from echelon.core.parameters import ParameterSpec
from echelon.core.units import binary_bytes, decimal_bytes, short_count
from echelon.cost.bytes.model_sizes import (
    MIXED_PRECISION,
    STAGES,
    mlp_weights,
    model_states,
    states_formula,
)
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Fold,
    FoldsFigure,
    Frame,
    Lesson,
    LessonControl,
    Place,
    Scene,
    Tile,
    choices,
)
from echelon.planner.view.document import DataTable, Fact

WEIGHTS = {"7B": 7_000_000_000, "13B": 13_000_000_000, "70B": 70_000_000_000}
RANKS = (1, 4, 8, 64)  # data ranks
BITS = 8  # of a byte
_CONTROLS = (
    LessonControl(name="weights", label="parameters psi", values=tuple(WEIGHTS)),
    LessonControl(
        name="ranks", label="data ranks N", values=tuple(map(str, RANKS)), start=RANKS.index(4)
    ),
)
_PARTS = (
    ("parameters", MIXED_PRECISION.parameters, "bf16 or fp16"),
    ("gradients", MIXED_PRECISION.gradients, "bf16 or fp16, one for each parameter"),
    ("master copy", MIXED_PRECISION.master, "fp32: small updates would round to nothing in bf16"),
    ("first moment", MIXED_PRECISION.moments // 2, "fp32: a running mean of gradients"),
    ("second moment", MIXED_PRECISION.moments // 2, "fp32: a running mean of their squares"),
)


# The MLP of a 7B model as guides draw it: D, 4 D, blocks, bytes of a 16-bit value.
HIDDEN = 4096
INNER = 16_384
LAYERS = 32
SIZE = 2
GATED_INNER = 11_008
"""The inner width of the gated MLP of a Llama 2 7B."""
NEURONS = 8
"""Columns of the drawing."""
WEIGHTS_RANKS = (2, 4)  # tensor ranks
_CONTROL = LessonControl(
    name="ranks", label="tensor ranks N", values=tuple(map(str, WEIGHTS_RANKS))
)


def memory_guide() -> Lesson:
    """Return the guide: parts of model state, and what each stage of ZeRO leaves."""
    return Lesson(
        id="guide-memory",
        topic="Guides",
        title="How 7B parameters become 112 GB",
        rows=("M25",),
        summary=(
            "A number takes as many bytes as its type says. Mixed precision with Adam keeps five "
            "numbers for each parameter: 16 bytes in all. Unfold each part."
        ),
        source="the formulas of model states that echelon explain zero prints",
        controls=_CONTROLS,
        scenes=tuple(
            _scene(WEIGHTS[one["weights"]], int(one["ranks"])) for one in choices(_CONTROLS)
        ),
        corrections=corrections("llm-training-18", "llm-training-20", "distributed-42"),
        commands=("echelon explain zero --parameters 7B --dp 4",),
    )


def _scene(weights: int, ranks: int) -> Scene:
    total = MIXED_PRECISION.total * weights
    frame = Frame(
        caption=(
            f"{short_count(weights)} parameters take {decimal_bytes(total)} of model state, before "
            "any activation."
        ),
        figures=(
            FoldsFigure(folds=(*(_part(weights, *one) for one in _PARTS), _together(weights))),
            FoldsFigure(folds=tuple(_stage(weights, ranks, place) for place in range(len(STAGES)))),
        ),
        facts=(
            Fact(
                "model states", decimal_bytes(total), f"{MIXED_PRECISION.total} x {weights:,} bytes"
            ),
            Fact("the same in GiB", binary_bytes(total)),
            Fact(
                "optimizer state",
                f"{100 * MIXED_PRECISION.optimizer / MIXED_PRECISION.total:.0f} % of it",
            ),
        ),
    )
    rows = tuple((name, str(size), decimal_bytes(size * weights)) for name, size, _ in _PARTS)
    head = ("", "bytes each", "together")
    return Scene(frames=(frame,), table=DataTable.of(head, rows))


def _part(weights: int, name: str, size: int, why: str) -> Fold:
    return Fold(
        title=name,
        result=decimal_bytes(size * weights),
        lines=(
            f"{why}.",
            f"{BITS * size} bits / {BITS} = {size} bytes for each number.",
            f"{size} x {weights:,} = {size * weights:,} bytes = {decimal_bytes(size * weights)}.",
        ),
    )


def _together(weights: int) -> Fold:
    sizes = [size for _, size, _ in _PARTS]
    total = sum(sizes) * weights
    return Fold(
        title="together",
        result=decimal_bytes(total),
        lines=(
            f"{' + '.join(map(str, sizes))} = {sum(sizes)} bytes for each parameter.",
            f"{sum(sizes)} x {weights:,} = {total:,} bytes.",
            f"{total:,} / 10^9 = {decimal_bytes(total)}.",
            f"{total:,} / 2^30 = {binary_bytes(total)}: the same bytes in binary units.",
        ),
    )


def _stage(weights: int, ranks: int, place: int) -> Fold:
    stage = STAGES[place]
    states = model_states(weights, stage, ranks)
    parts = (
        ("parameters", states.parameters, MIXED_PRECISION.parameters),
        ("gradients", states.gradients, MIXED_PRECISION.gradients),
        ("optimizer state", states.optimizer, MIXED_PRECISION.optimizer),
    )
    lines = [
        f"{name}: {size} x {weights:,}{f' / {ranks}' if held < size * weights else ''} = "
        f"{decimal_bytes(held)}."
        for name, held, size in parts
    ]
    shown = " + ".join(decimal_bytes(held) for _, held, _ in parts)
    return Fold(
        title=f"ZeRO stage {stage}, a rank of {ranks}: {states_formula(stage)}",
        result=decimal_bytes(states.total),
        lines=(*lines, f"{shown} = {decimal_bytes(states.total)}."),
    )


def weights_guide() -> Lesson:
    """Return the guide: a matrix, its columns, and columns over ranks."""
    return Lesson(
        id="guide-weights",
        topic="Guides",
        title="How weights are stored, and why they can be shared out",
        rows=("M25",),
        summary=(
            "A layer is one matrix: a row for each input, a column for each neuron. A neuron uses "
            "its own column only, so ranks can have different columns."
        ),
        source="the formula of an MLP's weights that echelon explain memory prints",
        controls=(_CONTROL,),
        scenes=tuple(
            Scene(frames=(_matrix(), _columns(), _shared(ranks))) for ranks in WEIGHTS_RANKS
        ),
        corrections=corrections("llm-training-25", "llm-training-26", "llm-training-27"),
        commands=("echelon explain memory llama2-7b --dp 4",),
    )


def columns_of_rank(ranks: int) -> int:
    """Return how many of the inner columns each tensor rank has."""
    up = ParameterSpec(name="up", shape=(INNER, HIDDEN), layer=0, split_dim=0)
    return up.local_numel(ranks) // HIDDEN


def _matrix() -> Frame:
    values = mlp_weights(HIDDEN, INNER, matrices=1)
    tile = Tile("W", f"W: {HIDDEN:,} x {INNER:,}", "the whole matrix", 0, rows=4, columns=NEURONS)
    return Frame(
        caption=f"One layer from {HIDDEN:,} inputs to {INNER:,} neurons is one matrix of numbers.",
        figures=(
            _figure((Place(label="W", note="down: inputs, across: neurons", tiles=(tile,)),)),
            FoldsFigure(folds=_folds()),
        ),
        facts=(
            Fact("values of the matrix", f"{values:,}"),
            Fact("in 16 bits", decimal_bytes(SIZE * values), f"= {binary_bytes(SIZE * values)}"),
        ),
    )


def _folds() -> tuple[Fold, ...]:
    one, both = mlp_weights(HIDDEN, INNER, matrices=1), mlp_weights(HIDDEN, INNER)
    gated = mlp_weights(HIDDEN, GATED_INNER, matrices=3)
    return (
        Fold(
            title="One matrix",
            result=binary_bytes(SIZE * one),
            lines=(
                f"{HIDDEN:,} x {INNER:,} = {one:,} values.",
                f"{SIZE} x {one:,} = {SIZE * one:,} bytes.",
                f"{decimal_bytes(SIZE * one)} = {binary_bytes(SIZE * one)}: 10^6 or 2^20 bytes.",
            ),
        ),
        Fold(
            title="An MLP: one matrix leads up, one leads back",
            result=binary_bytes(SIZE * both),
            lines=(
                f"h = GeLU(x W1), from {HIDDEN:,} to {INNER:,}; y = h W2, back to {HIDDEN:,}.",
                f"2 x {one:,} = {both:,} values, {decimal_bytes(SIZE * both)}.",
            ),
        ),
        Fold(
            title=f"All MLPs of {LAYERS} blocks",
            result=binary_bytes(SIZE * both * LAYERS),
            lines=(
                f"{LAYERS} x {both:,} = {LAYERS * both:,} values.",
                f"{decimal_bytes(SIZE * both * LAYERS)} = {binary_bytes(SIZE * both * LAYERS)}.",
            ),
        ),
        Fold(
            title=f"A gated MLP, as Llama 2 has it: three matrices of {GATED_INNER:,} neurons",
            result=binary_bytes(SIZE * gated),
            lines=(
                "y = (silu(x W1) * (x W3)) W2.",
                f"3 x {HIDDEN:,} x {GATED_INNER:,} = {gated:,} values, "
                f"{decimal_bytes(SIZE * gated)}.",
            ),
        ),
    )


def _columns() -> Frame:
    tiles = tuple(_column(at, at) for at in range(NEURONS))
    place = Place(label="W", note=f"{NEURONS} of {INNER:,} columns", tiles=tiles)
    return Frame(
        caption=(
            "A column holds the weights from every input to one neuron. Output j needs column j, "
            "and no other."
        ),
        figures=(_figure((place,)),),
        facts=(Fact("values of a column", f"{HIDDEN:,}", "one for each input"),),
    )


def _shared(ranks: int) -> Frame:
    each = NEURONS // ranks
    places = tuple(
        Place(
            label=f"rank {rank}",
            note=_columns_text(rank, ranks),
            tiles=tuple(_column(rank * each + at, at) for at in range(each)),
        )
        for rank in range(ranks)
    )
    return Frame(
        caption=(
            f"{ranks} ranks take different columns and compute their neurons at the same time. "
            "Nothing is summed: the second matrix, cut by rows, takes the parts as they are."
        ),
        figures=(_figure(places),),
        facts=(
            Fact("columns of a rank", f"{columns_of_rank(ranks):,}", f"{INNER:,} / {ranks}"),
            Fact(
                "of each matrix, a rank holds", binary_bytes(SIZE * columns_of_rank(ranks) * HIDDEN)
            ),
        ),
    )


def _columns_text(rank: int, ranks: int) -> str:
    each = columns_of_rank(ranks)
    return f"columns {rank * each:,} to {(rank + 1) * each - 1:,}"


def _column(number: int, at: int) -> Tile:
    return Tile(
        id=f"column {number}",
        label=str(number),
        words=f"column of neuron {number}",
        kind=0,
        column=at,
        rows=4,
    )


def _figure(places: tuple[Place, ...]) -> DiagramFigure:
    return DiagramFigure(kinds=("weights",), places=places)
