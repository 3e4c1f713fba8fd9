# SPDX-License-Identifier: Apache-2.0
"""An MLP over tensor ranks: columns, then rows, and nothing is sent in the middle."""

from __future__ import annotations

from itertools import permutations

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes
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
from echelon.page.lessons.matrices import (
    BYTES,
    EVERYWHERE,
    ColumnsThenRows,
    Matrix,
    Mlp,
    RowsThenColumns,
    block,
    degree_control,
    gather_fact,
    kinds_of,
    mlp_of,
    nothing_sent,
    numel,
    place,
    shape_text,
    sum_fact,
)
from echelon.planner.view.document import DataTable, Fact

TOKENS = 2  # rows of the input
HIDDEN = 4  # width of the MLP
INNER = 8  # its inner width
MEGATRON, OTHER = "columns, rows", "rows, columns"
_CONTROLS = (
    LessonControl(name="cut", label="W1 and W2 are cut by", values=(MEGATRON, OTHER)),
    degree_control(2, 4, start=2),
)


def mlp_pair() -> Lesson:
    """Return the lesson: the engine's order of cuts, and what the other order would send."""
    mlp = mlp_of(TOKENS, HIDDEN, INNER)
    return Lesson(
        id="mlp-pair",
        topic="Tensor parallelism",
        title="An MLP without communication in the middle",
        rows=("M6",),
        summary=(
            "A layer cut by columns leaves its output cut along the features: just as a layer cut "
            "by rows wants its input. So an MLP sends nothing between its two matrices."
        ),
        source=(
            "a real MLP of whole numbers with the activation max(0, x), cut by the ranges in which "
            "tensor ranks hold weights; bytes by the formulas of the collectives"
        ),
        controls=_CONTROLS,
        scenes=tuple(_scene(mlp, one["cut"], int(one["ranks"])) for one in choices(_CONTROLS)),
        corrections=corrections("distributed-13", "distributed-14", "distributed-19"),
    )


def sent_in_forward(mlp: Mlp, order: str, degree: int) -> int:
    """Return the bytes that a rank sends in a forward pass, by the order of the cuts."""
    output = numel(mlp.output) * BYTES
    if order == MEGATRON:
        return all_reduce_bytes(output, degree)
    inner = all_reduce_bytes(numel(mlp.inner) * BYTES, degree)
    return inner + all_gather_bytes(output // degree, degree)


def _scene(mlp: Mlp, order: str, degree: int) -> Scene:
    made = (
        _columns_then_rows(mlp, mlp.columns_then_rows(degree))
        if order == MEGATRON
        else _rows_then_columns(mlp, mlp.rows_then_columns(degree))
    )
    rows = [
        (one, sent, decimal_bytes(sent_in_forward(mlp, one, degree)))
        for one, sent in (
            (MEGATRON, "all-reduce of the output"),
            (OTHER, "all-reduce of the inner width, all-gather of the output"),
        )
    ]
    table = DataTable.of(("W1, W2 cut by", "sent forward", "a rank sends"), rows)
    return Scene(frames=made, table=table)


def _total(mlp: Mlp, order: str, degree: int) -> Fact:
    return Fact(
        "sent in the whole forward pass",
        decimal_bytes(sent_in_forward(mlp, order, degree)),
        f"W1 and W2 cut by {order}",
    )


def _equal(found: Matrix, mlp: Mlp) -> Fact:
    same = "yes" if found == mlp.output else "no"
    return Fact("equal to one device", same, f"all {numel(mlp.output)} numbers")


def _columns_then_rows(mlp: Mlp, cut: ColumnsThenRows) -> tuple[Frame, ...]:
    degree = len(cut.first)
    inner, output = shape_text(cut.inner[0]), shape_text(mlp.output)
    nothing = (nothing_sent(),)

    def frame(caption: str, has: str, facts: tuple[Fact, ...] = nothing) -> Frame:
        return Frame(caption=caption, figures=(_megatron(mlp, cut, has),), facts=facts)

    return (
        frame(
            f"Step 1: every rank has the input X, {shape_text(mlp.x)}, its columns of W1 and its "
            "rows of W2.",
            "x w1 w2",
        ),
        frame(
            f"Step 2: X W1 gives each rank some features of the inner width, {inner}, complete.",
            "x w1 h",
        ),
        frame(
            "Step 3: the activation works number by number, so it needs no other rank.",
            "h a",
        ),
        frame(
            "Step 4: the rows of W2 that a rank has are those of the features that it has. It "
            "multiplies at once, and gets one summand of the output.",
            "a w2 z",
        ),
        frame(
            f"Step 5: one all-reduce of the output, {output}, is all that the forward pass sends. "
            "Backward sends one, too, of the gradient of X.",
            "z y",
            (
                sum_fact(numel(mlp.output), degree, f"Y, {output}"),
                _total(mlp, MEGATRON, degree),
                _equal(cut.output, mlp),
            ),
        ),
    )


def _megatron(mlp: Mlp, cut: ColumnsThenRows, has: str) -> DiagramFigure:
    places: list[Place] = []
    last = "y" in has.split()
    for rank in range(len(cut.first)):
        kind, own = rank + 1, str(rank)
        made: dict[str, tuple[str, Tile]] = {
            "x": ("X", block(f"x{own}", "X", mlp.x, kind=EVERYWHERE)),
            "w1": (
                f"W1, part {own}",
                block(f"u{own}", "columns of W1", cut.first[rank], kind=kind),
            ),
            "w2": (f"W2, part {own}", block(f"d{own}", "rows of W2", cut.second[rank], kind=kind)),
            "h": ("X W1", block(f"h{own}", "features of X W1", cut.inner[rank], kind=kind)),
            "a": (
                "max(0, x)",
                block(f"a{own}", "activated", cut.active[rank], kind=kind, origin=f"h{own}"),
            ),
            "z": (
                "summand of Y",
                block(
                    f"z{own}",
                    "summand of the output",
                    cut.partial_sums[rank],
                    kind=kind,
                    state="part",
                    origin=f"a{own}",
                ),
            ),
            "y": ("Y", block(f"y{own}", "output", cut.output, kind=EVERYWHERE, origin=f"z{own}")),
        }
        places += [place(made[one][0], f"rank {rank}", [made[one][1]]) for one in has.split()]
    moves = _to_all(len(cut.first), "z", "y", "the summand of") if last else ()
    return DiagramFigure(kinds=kinds_of(len(cut.first)), places=tuple(places), moves=moves)


def _to_all(degree: int, source: str, target: str, what: str) -> tuple[Move, ...]:
    return tuple(
        Move(f"{source}{rank}", f"{target}{other}", f"{what} rank {rank} goes to rank {other}")
        for rank, other in permutations(range(degree), 2)
    )


def _rows_then_columns(mlp: Mlp, cut: RowsThenColumns) -> tuple[Frame, ...]:
    degree = len(cut.first)
    inner, output = shape_text(mlp.inner), shape_text(mlp.output)
    nothing = (nothing_sent(),)
    joined = tuple(
        tuple(x for part in rows for x in part) for rows in zip(*cut.outputs, strict=True)
    )

    def frame(caption: str, has: str, facts: tuple[Fact, ...] = nothing) -> Frame:
        return Frame(caption=caption, figures=(_other(cut, has),), facts=facts)

    wrong = Fact(
        "wrong, if each activates its own summand",
        f"{cut.num_wrong} of {numel(mlp.inner)}",
        "max(0, a) + max(0, b) is not max(0, a + b)",
    )
    return (
        frame(
            "Step 1: X is cut along its features, W1 by rows, W2 by columns.",
            "x w1 w2",
        ),
        frame(
            f"Step 2: X W1 gives each rank a summand of the whole inner width, {inner}.",
            "x w1 h",
        ),
        frame(
            "Step 3: the activation of a summand means nothing. The sum has to come first: an "
            "all-reduce in the middle, of the inner width.",
            "h a",
            (sum_fact(numel(mlp.inner), degree, f"X W1, {inner}"), wrong),
        ),
        frame(
            "Step 4: every rank now has all features, and multiplies its columns of W2.",
            "a w2 z",
        ),
        frame(
            f"Step 5: an all-gather joins the columns of the output, {output}.",
            "y",
            (
                gather_fact(numel(cut.outputs[0]), degree, f"Y, {output}"),
                _total(mlp, OTHER, degree),
                _equal(joined, mlp),
            ),
        ),
    )


def _other(cut: RowsThenColumns, has: str) -> DiagramFigure:
    places: list[Place] = []
    degree, names = len(cut.first), has.split()
    moves = _to_all(degree, "h", "a", "the summand of") if names == ["h", "a"] else ()
    for rank in range(degree):
        kind, own = rank + 1, str(rank)
        summand = cut.partial_sums[rank]
        made: dict[str, tuple[str, list[Tile]]] = {
            "x": (f"X, part {own}", [block(f"x{own}", "of X", cut.inputs[rank], kind=kind)]),
            "w1": (f"W1, part {own}", [block(f"u{own}", "of W1", cut.first[rank], kind=kind)]),
            "w2": (f"W2, part {own}", [block(f"d{own}", "of W2", cut.second[rank], kind=kind)]),
            "h": (
                "summand of X W1",
                [block(f"h{own}", "summand", summand, kind=kind, state="part")],
            ),
            "a": (
                "max(0, sum)",
                [block(f"a{own}", "activated", cut.active, kind=EVERYWHERE, origin=f"h{own}")],
            ),
            "z": (
                f"Y, part {own}",
                [block(f"z{own}-{own}", "columns of Y", cut.outputs[rank], kind=kind)],
            ),
            "y": ("Y", _joined(cut, rank)),
        }
        places += [place(made[one][0], f"rank {rank}", made[one][1]) for one in names]
    return DiagramFigure(kinds=kinds_of(degree), places=tuple(places), moves=moves)


def _joined(cut: RowsThenColumns, rank: int) -> list[Tile]:
    return [
        block(
            f"z{other}-{rank}",
            "columns of Y",
            part,
            kind=other + 1,
            column=other,
            origin="" if other == rank else f"z{other}-{other}",
        )
        for other, part in enumerate(cut.outputs)
    ]
