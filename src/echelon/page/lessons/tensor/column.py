# SPDX-License-Identifier: Apache-2.0
"""A linear layer cut by columns, in five steps, with numbers that add up."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.parameters import ParameterSpec
from echelon.page.document import Fact
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.diagram import DiagramFigure, Move, Place, Tile
from echelon.page.lessons.lesson import Frame, Lesson, Scene, choices
from echelon.page.lessons.matrices import (
    Matrix,
    beside,
    block,
    cut,
    dot_text,
    filled,
    mlp_weights,
    numel,
    product,
    shape_text,
)
from echelon.page.lessons.tensor.sums import (
    EVERYWHERE,
    degree_control,
    gather_fact,
    kinds_of,
    nothing_sent,
    place,
    weights_fact,
)

TOKENS = 2  # rows of the input
HIDDEN = 2  # features of the input, H
WIDTH = 8  # features of the output, 4 H
_CONTROLS = (degree_control(2, 4, start=4),)
WHOLE = "one device, to compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnLayer:
    """Hold a product and its parts on N ranks."""

    x: Matrix
    weight: Matrix
    parts: tuple[Matrix, ...]

    @property
    def outputs(self) -> tuple[Matrix, ...]:
        """Return what each rank computes: the whole input times its columns."""
        return tuple(product(self.x, part) for part in self.parts)

    @property
    def degree(self) -> int:
        """Return N."""
        return len(self.parts)


def column_layer(degree: int) -> ColumnLayer:
    """Return the layer of the lesson, cut as the engine cuts it."""
    weight = filled(HIDDEN, WIDTH, 6)
    return ColumnLayer(x=filled(TOKENS, HIDDEN, 7), weight=weight, parts=cut(up(), weight, degree))


def up() -> ParameterSpec:
    """Return the engine's record of the matrix that is cut."""
    return mlp_weights(HIDDEN, WIDTH)[0]


def column_parallel() -> Lesson:
    """Return the lesson: replicate, split, compute, look at the parts, gather."""
    return Lesson(
        id="column-parallel",
        topic="Tensor parallelism",
        title="A layer cut by columns, in five steps",
        rows=("M4",),
        summary=(
            "Every rank has the whole input and some columns of the weight, so it computes some "
            "features of the output, complete. Only who needs all features has to gather."
        ),
        source=(
            "a real product of whole numbers, cut by the ranges in which tensor ranks hold weights;"
            " bytes by the formula of an all-gather"
        ),
        controls=_CONTROLS,
        scenes=tuple(_scene(column_layer(int(one["ranks"]))) for one in choices(_CONTROLS)),
        corrections=corrections("distributed-03", "distributed-15", "llm-training-27"),
    )


def _scene(layer: ColumnLayer) -> Scene:
    numbers, n = layer.outputs[0], layer.degree
    held = weights_fact(numel(layer.parts[0]), numel(layer.weight))
    whole = beside(layer.outputs)
    same = whole == product(layer.x, layer.weight)
    shapes = tuple(map(shape_text, (layer.x, layer.parts[0], numbers, whole)))
    return Scene(
        frames=(
            Frame(
                caption=f"Step 1: every rank has the same input X, {shapes[0]}. The weight W, "
                f"{shape_text(layer.weight)}, is still in one place.",
                figures=(_figure(layer, _weight_whole(layer), has=("x",)),),
                facts=(weights_fact(0, numel(layer.weight)), nothing_sent()),
            ),
            Frame(
                caption=f"Step 2: W is cut by columns. Rank i gets W{_sub(layer)}, {shapes[1]}.",
                figures=(_figure(layer, (), has=("x", "w")),),
                facts=(held, nothing_sent()),
            ),
            Frame(
                caption=f"Step 3: each rank multiplies what it has: {shapes[0]} x {shapes[1]} = "
                f"{shapes[2]}. Nobody waits for anybody.",
                figures=(_figure(layer, (), has=("x", "w", "y")),),
                facts=(
                    Fact(
                        name="first number of Y0",
                        value=str(numbers[0][0]),
                        note=dot_text(layer.x, layer.parts[0]),
                    ),
                    nothing_sent(),
                ),
            ),
            Frame(
                caption=f"Step 4: each rank has 1/{n} of the output's features, and these are "
                "complete: side by side they are what one device computes.",
                figures=(_figure(layer, _compared(layer), has=("y",)),),
                facts=(
                    Fact(
                        name="equal to one device",
                        value="yes" if same else "no",
                        note=f"{numel(whole)} numbers, each complete on one rank",
                    ),
                    nothing_sent(),
                ),
            ),
            Frame(
                caption="Step 5: an all-gather puts the parts side by side on every rank, "
                f"{shapes[3]}. A layer that is cut by rows would not need it.",
                figures=(_gathered(layer),),
                facts=(gather_fact(numel(numbers), n, f"Y, {shapes[3]}"),),
            ),
        )
    )


def _sub(layer: ColumnLayer) -> str:
    return f"0 to W{layer.degree - 1} by its number"


def _weight_whole(layer: ColumnLayer) -> tuple[Place, ...]:
    tiles = [
        block(f"w{rank}", f"W{rank}", part, kind=rank + 1, column=rank)
        for rank, part in enumerate(layer.parts)
    ]
    return (place("W", "before it is cut", tiles, shape_text(layer.weight)),)


def _figure(layer: ColumnLayer, first: tuple[Place, ...], *, has: tuple[str, ...]) -> DiagramFigure:
    places = [*first]
    for rank, (part, output) in enumerate(zip(layer.parts, layer.outputs, strict=True)):
        found: dict[str, Place] = {
            "x": _place("X", rank, block(f"x-{rank}", "X", layer.x, kind=EVERYWHERE)),
            "w": _place(f"W{rank}", rank, block(f"w{rank}", f"W{rank}", part, kind=rank + 1)),
            "y": _place(
                f"Y{rank} = X W{rank}",
                rank,
                block(f"y{rank}-{rank}", f"Y{rank}", output, kind=rank + 1, origin=f"w{rank}"),
            ),
        }
        places += [found[name] for name in has]
    return DiagramFigure(kinds=kinds_of(layer.degree), places=tuple(places))


def _place(label: str, rank: int, tile: Tile) -> Place:
    return place(label, f"rank {rank}", [tile])


def _compared(layer: ColumnLayer) -> tuple[Place, ...]:
    """Return the whole product in the columns of the ranks."""
    tiles: list[Tile] = []
    whole, start = product(layer.x, layer.weight), 0
    for rank, output in enumerate(layer.outputs):
        stop = start + len(output[0])
        part = tuple(row[start:stop] for row in whole)
        name = f"columns {start} to {stop - 1} of Y"
        tiles.append(block(f"whole{rank}", name, part, kind=rank + 1, column=rank))
        start = stop
    return (place("Y = X W", WHOLE, tiles, shape_text(whole)),)


def _gathered(layer: ColumnLayer) -> DiagramFigure:
    n, places = layer.degree, list[Place]()
    for rank in range(n):
        tiles = [
            block(
                f"y{other}-{rank}",
                f"Y{other}",
                output,
                kind=other + 1,
                column=other,
                origin="" if other == rank else f"y{other}-{other}",
            )
            for other, output in enumerate(layer.outputs)
        ]
        places.append(place("Y", f"rank {rank}", tiles, shape_text(beside(layer.outputs))))
    moves = tuple(
        Move(
            source=f"y{rank}-{rank}",
            target=f"y{rank}-{other}",
            words=f"Y{rank} is copied from rank {rank} to rank {other}",
        )
        for rank in range(n)
        for other in range(n)
        if other != rank
    )
    return DiagramFigure(kinds=kinds_of(n), places=tuple(places), moves=moves)
