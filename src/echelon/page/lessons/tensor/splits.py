# SPDX-License-Identifier: Apache-2.0
"""A matrix at the size of a model, cut by columns or by rows: shapes, bytes and the collective."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.parameters import ParameterSpec
from echelon.core.units import decimal_bytes
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Frame,
    Lesson,
    LessonControl,
    Place,
    Scene,
    Tile,
    TileState,
    choices,
)
from echelon.page.lessons.matrices import (
    BYTES,
    EVERYWHERE,
    degree_control,
    gather_fact,
    kinds_of,
    mlp_weights,
    nothing_sent,
    place,
    sum_fact,
)
from echelon.planner.view.document import DataTable, Fact

TOKENS = 2048  # tokens of a microbatch
FIRST = 4096  # features of the input
SECOND = 16384  # features of the output
COLUMNS, ROWS = "columns", "rows"
_CONTROLS = (
    LessonControl(name="cut", label="the matrix is cut by", values=(COLUMNS, ROWS)),
    degree_control(2, 4, start=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Hold the shapes of a product X A = Y that is cut over N tensor ranks."""

    by: str
    degree: int
    spec: ParameterSpec

    @property
    def part(self) -> tuple[int, int]:
        """Return the shape [in, out] of A on a rank; the engine stores it [out, in]."""
        out, inner = self.spec.local_shape(self.degree)
        return inner, out

    @property
    def input(self) -> tuple[int, int]:
        """Return the shape of the input that a rank multiplies."""
        return TOKENS, self.part[0]

    @property
    def output(self) -> tuple[int, int]:
        """Return the shape of what a rank computes."""
        return TOKENS, self.part[1]

    @property
    def sent(self) -> Fact:
        """Return what a rank sends so that all have the whole output."""
        whole = f"Y, {_shape((TOKENS, SECOND))}"
        if self.by == COLUMNS:
            return gather_fact(self.output[0] * self.output[1], self.degree, whole)
        return sum_fact(TOKENS * SECOND, self.degree, whole)


def cut_of(by: str, degree: int) -> Cut:
    """Return a cut of a matrix [4096, 16384] by columns or by rows, as the engine has both."""
    up, _ = mlp_weights(FIRST, SECOND)
    _, down = mlp_weights(SECOND, FIRST)
    return Cut(by=by, degree=degree, spec=up if by == COLUMNS else down)


def matrix_splits() -> Lesson:
    """Return the lesson: four steps for each cut and degree."""
    return Lesson(
        id="matrix-splits",
        topic="Tensor parallelism",
        title="Two ways to cut a matrix, and what each has to send",
        rows=("M3",),
        summary=(
            "By columns, ranks share out the features of the output and join them. By rows, they "
            "share out those of the input and add up. Weights shrink alike; what is sent differs."
        ),
        source=(
            "shapes of the engine's table of parameters; bytes by the formulas of the collectives, "
            f"for {TOKENS:,} tokens in bf16"
        ),
        controls=_CONTROLS,
        scenes=tuple(_scene(cut_of(one["cut"], int(one["ranks"]))) for one in choices(_CONTROLS)),
        corrections=corrections("distributed-09", "distributed-10", "distributed-19"),
    )


def _scene(cut: Cut) -> Scene:
    columns, n = cut.by == COLUMNS, cut.degree
    part, whole = cut.part, (FIRST, SECOND)
    weights = Fact(
        "weights on a rank",
        f"{part[0] * part[1]:,}",
        f"{decimal_bytes(part[0] * part[1] * BYTES)} in bf16, 1/{n} of the matrix",
    )
    frames = (
        Frame(
            caption=f"Step 1: the input X, {_shape((TOKENS, FIRST))}, and the matrix A, "
            f"{_shape(whole)}.",
            figures=(DiagramFigure(kinds=kinds_of(n), places=(_input(cut), _weight(cut))),),
            facts=(
                Fact(
                    "weights",
                    f"{FIRST * SECOND:,}",
                    f"{decimal_bytes(FIRST * SECOND * BYTES)} in bf16",
                ),
            ),
        ),
        Frame(
            caption=f"Step 2: A is cut by {cut.by}: {_shape(part)} on each of {n} ranks. "
            + (
                "The input stays whole, on every rank."
                if columns
                else "The input is cut along its features, to match."
            ),
            figures=(_ranks(cut, ("x", "a")),),
            facts=(weights,),
        ),
        Frame(
            caption=f"Step 3: each rank computes {_shape(cut.input)} x {_shape(part)} = "
            f"{_shape(cut.output)}: "
            + (
                "some features, complete."
                if columns
                else "all features, but one summand of each number."
            ),
            figures=(_ranks(cut, ("x", "a", "y")),),
            facts=(weights, nothing_sent()),
        ),
        Frame(
            caption="Step 4: "
            + (
                "an all-gather joins the features on every rank. Before a matrix that is cut by "
                "rows it is left out."
                if columns
                else "an all-reduce adds up the summands, and every rank has the whole output."
            ),
            figures=(_ranks(cut, ("all",)),),
            facts=(weights, cut.sent),
        ),
    )
    return Scene(frames=frames, table=_table(n))


def _table(degree: int) -> DataTable:
    rows = [
        (
            by,
            _shape(found.part),
            _shape(found.input),
            _shape(found.output),
            "all-gather" if by == COLUMNS else "all-reduce",
            found.sent.value,
        )
        for by in (COLUMNS, ROWS)
        for found in (cut_of(by, degree),)
    ]
    head = ("cut by", "A on a rank", "X on a rank", "a rank computes", "collective", "it sends")
    return DataTable.of(head, rows)


def _input(cut: Cut) -> Place:
    if cut.by == COLUMNS:
        tiles = [Tile("x", _shape((TOKENS, FIRST)), "the whole input", EVERYWHERE)]
    else:
        tiles = [
            Tile(f"x{rank}", _shape(cut.input), "features of the input", rank + 1, column=rank)
            for rank in range(cut.degree)
        ]
    return place("X", "", tiles, _shape((TOKENS, FIRST)))


def _weight(cut: Cut) -> Place:
    columns = cut.by == COLUMNS
    tiles = [
        Tile(
            f"a{rank}",
            _shape(cut.part),
            f"{cut.by} of A",
            rank + 1,
            row=0 if columns else rank,
            column=rank if columns else 0,
        )
        for rank in range(cut.degree)
    ]
    return place("A", "", tiles, _shape((FIRST, SECOND)))


def _ranks(cut: Cut, has: tuple[str, ...]) -> DiagramFigure:
    places: list[Place] = []
    for rank in range(cut.degree):
        made = {
            "x": (f"X{rank}" if cut.by == ROWS else "X", [_input_of(cut, rank)]),
            "a": (f"A{rank}", [Tile(f"a{rank}", _shape(cut.part), f"{cut.by} of A", rank + 1)]),
            "y": (f"Y{rank}", [_output_of(cut, rank)]),
            "all": ("Y", _whole_output(cut, rank)),
        }
        places += [place(made[one][0], f"rank {rank}", made[one][1]) for one in has]
    return DiagramFigure(kinds=kinds_of(cut.degree), places=tuple(places))


def _input_of(cut: Cut, rank: int) -> Tile:
    if cut.by == ROWS:
        return Tile(f"x{rank}", _shape(cut.input), "features of the input", rank + 1)
    return Tile(f"x-{rank}", _shape(cut.input), "the whole input", EVERYWHERE, origin="x")


def _output_of(cut: Cut, rank: int) -> Tile:
    columns = cut.by == COLUMNS
    words = "features of the output" if columns else "summand of the whole output"
    state: TileState = "whole" if columns else "part"
    return Tile(f"y{rank}-{rank}", _shape(cut.output), words, rank + 1, state=state)


def _whole_output(cut: Cut, rank: int) -> list[Tile]:
    if cut.by == ROWS:
        whole = _shape((TOKENS, SECOND))
        return [Tile(f"y-{rank}", whole, "the sum", EVERYWHERE, origin=f"y{rank}-{rank}")]
    return [
        Tile(
            f"y{other}-{rank}",
            f"Y{other}",
            f"features of the output, {_shape(cut.output)}",
            other + 1,
            column=other,
            origin="" if other == rank else f"y{other}-{other}",
        )
        for other in range(cut.degree)
    ]


def _shape(shape: tuple[int, int]) -> str:
    return f"[{shape[0]}, {shape[1]}]"
