# SPDX-License-Identifier: Apache-2.0
"""A small MLP, 4 wide and 8 inside, on one rank and on two, side by side."""

from __future__ import annotations

from echelon.core.parameters import ParameterSpec
from echelon.core.units import decimal_bytes
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
    TileState,
)
from echelon.page.lessons.matrices import (
    BYTES,
    EVERYWHERE,
    ColumnsThenRows,
    Matrix,
    Mlp,
    block,
    columns_of,
    kinds_of,
    mlp_of,
    mlp_weights,
    numel,
    place,
    rectified,
    sum_fact,
    sum_text,
)
from echelon.planner.view.document import DataTable, Fact

HIDDEN = 4  # width of the MLP
INNER = 8  # its inner width
DEGREE = 2  # tensor ranks
WITHOUT, WITH, BOTH = "without", "with", "side by side"
_CONTROLS = (
    LessonControl(name="tensor", label="tensor parallelism", values=(BOTH, WITHOUT, WITH), start=0),
)
_ALONE = "without: one rank"
_STEPS = (
    (
        "Step 1: the token x and the weights. {alone} weights on one rank, {held} on each of two.",
        "x w1 w2",
    ),
    (
        "Step 2: x W1. One rank computes 8 features; each of two computes 4, at the same time.",
        "x w1 h",
    ),
    ("Step 3: the activation max(0, x), number by number. Nobody needs anybody.", "h a"),
    ("Step 4: times W2. One rank has the output; each of two has a summand of it.", "a w2 z"),
    ("Step 5: one all-reduce adds the summands, and both ranks have what one rank has.", "z y"),
)


def toy_mlp() -> Lesson:
    """Return the lesson: the same token through the same weights, without and with a cut."""
    mlp = mlp_of(1, HIDDEN, INNER)
    return Lesson(
        id="toy-mlp",
        topic="Tensor parallelism",
        title="A whole MLP, without and with tensor parallelism",
        rows=("M16",),
        summary=(
            "An MLP of 64 weights, 4 wide and 8 inside. Two tensor ranks hold 32 each, compute "
            "half of each product, and come to the same numbers."
        ),
        source=(
            "a real MLP of whole numbers with the activation max(0, x), cut by the ranges in which "
            "tensor ranks hold weights; bytes by the formula of an all-reduce"
        ),
        controls=_CONTROLS,
        scenes=tuple(_scene(mlp, one) for one in _CONTROLS[0].values),
        corrections=corrections("llm-training-28", "llm-training-29", "llm-training-30"),
        commands=("echelon plan llama3-8b --cluster 8xh100 --set mesh.tp=8",),
    )


def weights_held(specs: tuple[ParameterSpec, ...], degree: int) -> int:
    """Return how many weights of these matrices one of `degree` tensor ranks holds."""
    return sum(spec.local_numel(degree) for spec in specs)


def _scene(mlp: Mlp, shown: str) -> Scene:
    cut, specs = mlp.columns_then_rows(DEGREE), mlp_weights(HIDDEN, INNER)
    alone, held = weights_held(specs, 1), weights_held(specs, DEGREE)
    frames = tuple(
        Frame(
            caption=caption.format(alone=alone, held=held),
            figures=(_figure(mlp, cut, has.split(), shown),),
            facts=_facts(mlp, cut, number),
        )
        for number, (caption, has) in enumerate(_STEPS)
    )
    return Scene(frames=frames, table=_table(mlp, specs))


def _facts(mlp: Mlp, cut: ColumnsThenRows, step: int) -> tuple[Fact, ...]:
    specs, last = mlp_weights(HIDDEN, INNER), len(_STEPS) - 1
    held = weights_held(specs, DEGREE)
    weights = Fact(
        "weights on a rank",
        f"{weights_held(specs, 1)} without, {held} with",
        f"{decimal_bytes(held * BYTES)} in bf16 on each of two",
    )
    if step < last:
        sent = Fact("a rank sends", decimal_bytes(0), "nothing up to here")
        return (weights, sent)
    corner = sum_text([one[0][0] for one in cut.partial_sums])
    same = "yes" if cut.output == mlp.output else "no"
    return (
        weights,
        sum_fact(numel(mlp.output), DEGREE, "y, [1, 4]"),
        Fact("equal to one rank", same, f"the first number: {corner}"),
    )


def _table(mlp: Mlp, specs: tuple[ParameterSpec, ...]) -> DataTable:
    sent = sum_fact(numel(mlp.output), DEGREE, "y").value
    rows = (
        ("weights of W1 on a rank", *_both(specs[:1])),
        ("weights of W2 on a rank", *_both(specs[1:])),
        ("bytes of weights on a rank, bf16", *_bytes(specs)),
        # A token is multiplied by each weight once.
        ("multiplications on a rank, a token", *_both(specs)),
        ("all-reduces, forward", "0", "1"),
        ("a rank sends, forward", decimal_bytes(0), sent),
    )
    return DataTable.of(("", "one rank", f"each of {DEGREE}"), rows)


def _both(specs: tuple[ParameterSpec, ...]) -> tuple[str, str]:
    return str(weights_held(specs, 1)), str(weights_held(specs, DEGREE))


def _bytes(specs: tuple[ParameterSpec, ...]) -> tuple[str, str]:
    counts = (weights_held(specs, 1), weights_held(specs, DEGREE))
    return decimal_bytes(counts[0] * BYTES), decimal_bytes(counts[1] * BYTES)


def _figure(mlp: Mlp, cut: ColumnsThenRows, has: list[str], shown: str) -> DiagramFigure:
    places: list[Place] = []
    if shown != WITH:
        places += _alone(mlp, cut, has)
    if shown != WITHOUT:
        for rank in range(DEGREE):
            places += _of_rank(cut, rank, has)
    moves = _sum() if "y" in has and shown != WITHOUT else ()
    return DiagramFigure(kinds=kinds_of(DEGREE), places=tuple(places), moves=moves)


def _sum() -> tuple[Move, ...]:
    return tuple(
        Move(f"z{rank}", f"y{1 - rank}", f"the summand of rank {rank} goes to rank {1 - rank}")
        for rank in range(DEGREE)
    )


def _alone(mlp: Mlp, cut: ColumnsThenRows, has: list[str]) -> list[Place]:
    """Return the whole MLP, in the parts that two ranks would have."""
    inner = _halves("h", "features of x W1", mlp.inner)
    active = _halves("a", "activated", rectified(mlp.inner), origin="h")
    whole = block("alone-z", "the output", mlp.output, kind=EVERYWHERE)
    made: dict[str, tuple[str, list[Tile]]] = {
        "x": ("x", [block("alone-x", "the token", mlp.x, kind=EVERYWHERE)]),
        "w1": ("W1", _parts("w1", "columns of W1", cut.first, down=False)),
        "w2": ("W2", _parts("w2", "rows of W2", cut.second, down=True)),
        "h": ("x W1", inner),
        "a": ("max(0, x)", active),
        "z": ("y", [whole]),
    }
    return [place(made[one][0], _ALONE, made[one][1]) for one in has if one in made]


def _parts(id: str, name: str, parts: tuple[Matrix, ...], *, down: bool) -> list[Tile]:
    return [
        block(
            f"alone-{id}-{rank}",
            name,
            part,
            kind=rank + 1,
            row=rank if down else 0,
            column=0 if down else rank,
        )
        for rank, part in enumerate(parts)
    ]


def _halves(id: str, name: str, matrix: Matrix, origin: str = "") -> list[Tile]:
    size = len(matrix[0]) // DEGREE
    return [
        block(
            f"alone-{id}-{rank}",
            name,
            columns_of(matrix, rank * size, (rank + 1) * size),
            kind=rank + 1,
            column=rank,
            origin=f"alone-{origin}-{rank}" if origin else "",
        )
        for rank in range(DEGREE)
    ]


def _of_rank(cut: ColumnsThenRows, rank: int, has: list[str]) -> list[Place]:
    kind = rank + 1

    def tile(id: str, name: str, matrix: Matrix, origin: str = "", part: bool = False) -> Tile:
        state: TileState = "part" if part else "whole"
        origin = f"{origin}{rank}" if origin else ""
        return block(f"{id}{rank}", name, matrix, kind=kind, state=state, origin=origin)

    output = block(f"y{rank}", "the output", cut.output, kind=EVERYWHERE, origin=f"z{rank}")
    made = {
        "x": ("x", block(f"x{rank}", "the token", cut.x, kind=EVERYWHERE)),
        "w1": ("W1", tile("u", "columns of W1", cut.first[rank])),
        "w2": ("W2", tile("d", "rows of W2", cut.second[rank])),
        "h": ("x W1", tile("h", "features of x W1", cut.inner[rank])),
        "a": ("max(0, x)", tile("a", "activated", cut.active[rank], "h")),
        "z": ("summand of y", tile("z", "summand of y", cut.partial_sums[rank], "a", True)),
        "y": ("y", output),
    }
    return [place(made[one][0], f"with: rank {rank}", [made[one][1]]) for one in has]
