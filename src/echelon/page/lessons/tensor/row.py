# SPDX-License-Identifier: Apache-2.0
"""A linear layer cut by rows, in five steps: every rank has one summand of each number."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.parameters import ParameterSpec
from echelon.page.document import Fact
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.diagram import DiagramFigure, Move, Place, Tile
from echelon.page.lessons.lesson import Frame, Lesson, Scene, choices
from echelon.page.lessons.matrices import (
    Matrix,
    added,
    beside,
    block,
    columns_of,
    cut,
    filled,
    mlp_weights,
    numel,
    product,
    shape_text,
    sum_text,
)
from echelon.page.lessons.tensor.sums import (
    degree_control,
    kinds_of,
    nothing_sent,
    place,
    sum_fact,
    weights_fact,
)

TOKENS = 2  # rows of the input
WIDTH = 8  # features of the input, which are cut
HIDDEN = 2  # features of the output
_CONTROLS = (degree_control(2, 4, start=4),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayer:
    """Hold a product and its parts on N ranks."""

    x: Matrix
    weight: Matrix
    inputs: tuple[Matrix, ...]
    parts: tuple[Matrix, ...]

    @property
    def partial_sums(self) -> tuple[Matrix, ...]:
        """Return what each rank computes: its features of the input times their rows."""
        return tuple(product(x, part) for x, part in zip(self.inputs, self.parts, strict=True))

    @property
    def degree(self) -> int:
        """Return N."""
        return len(self.parts)


def row_layer(degree: int) -> RowLayer:
    """Return the layer of the lesson, cut as the engine cuts it."""
    x, weight, spec = filled(TOKENS, WIDTH, 7), filled(WIDTH, HIDDEN, 6), down()
    ranges = [spec.local_range(degree, rank) for rank in range(degree)]
    return RowLayer(
        x=x,
        weight=weight,
        inputs=tuple(columns_of(x, *one) for one in ranges),
        parts=cut(spec, weight, degree),
    )


def down() -> ParameterSpec:
    """Return the engine's record of the matrix that is cut."""
    return mlp_weights(HIDDEN, WIDTH)[1]


def row_parallel() -> Lesson:
    """Return the lesson: split the input, split the weight, compute, look at the sums, add."""
    return Lesson(
        id="row-parallel",
        topic="Tensor parallelism",
        title="A layer cut by rows, in five steps",
        rows=("M5",),
        summary=(
            "Every rank has some features of the input and the rows of the weight that they meet. "
            "Each computes the whole output, but only one summand of each number."
        ),
        source=(
            "a real product of whole numbers, cut by the ranges in which tensor ranks hold weights;"
            " bytes by the formula of an all-reduce"
        ),
        controls=_CONTROLS,
        scenes=tuple(_scene(row_layer(int(one["ranks"]))) for one in choices(_CONTROLS)),
        corrections=corrections("distributed-12", "distributed-18"),
    )


def _scene(layer: RowLayer) -> Scene:
    sums, n = layer.partial_sums, layer.degree
    held = weights_fact(numel(layer.parts[0]), numel(layer.weight))
    total = added(sums)
    same = total == product(layer.x, layer.weight)
    shapes = tuple(map(shape_text, (layer.inputs[0], layer.parts[0], total)))
    corner = sum_text([one[0][0] for one in sums])
    return Scene(
        frames=(
            Frame(
                caption=f"Step 1: the input X, {shape_text(layer.x)}, is cut along its last dim: "
                f"rank i gets {shapes[0]}. After a layer cut by columns it lies like this already.",
                figures=(_figure(layer, _whole_weight(layer), has=("x",)),),
                facts=(weights_fact(0, numel(layer.weight)), nothing_sent()),
            ),
            Frame(
                caption=f"Step 2: W, {shape_text(layer.weight)}, is cut by rows, {shapes[1]} each: "
                "a row belongs to the feature of the input that it multiplies.",
                figures=(_figure(layer, (), has=("x", "w")),),
                facts=(held, nothing_sent()),
            ),
            Frame(
                caption=f"Step 3: each rank multiplies what it has: {shapes[0]} x {shapes[1]} = "
                f"{shapes[2]}, as large as the whole output.",
                figures=(_figure(layer, (), has=("x", "w", "y")),),
                facts=(nothing_sent(),),
            ),
            Frame(
                caption=f"Step 4: no number is complete. Each rank has one of {n} summands of "
                "every number (hatched), and only their sum is what one device computes.",
                figures=(_figure(layer, _compared(layer), has=("y",)),),
                facts=(
                    Fact(
                        name="first number of Y",
                        value=str(total[0][0]),
                        note=corner,
                    ),
                    Fact(
                        name="sum equal to one device",
                        value="yes" if same else "no",
                        note=f"all {numel(total)} numbers",
                    ),
                ),
            ),
            Frame(
                caption="Step 5: an all-reduce adds the parts up, and every rank has the whole "
                f"output, {shapes[2]}. A bias is added once, after the sum.",
                figures=(_summed(layer),),
                facts=(sum_fact(numel(total), n, f"Y, {shapes[2]}"),),
            ),
        )
    )


def _whole_weight(layer: RowLayer) -> tuple[Place, ...]:
    tiles = [
        block(f"w{rank}", f"W{rank}", part, kind=rank + 1, row=rank)
        for rank, part in enumerate(layer.parts)
    ]
    return (place("W", "before it is cut", tiles, shape_text(layer.weight)),)


def _figure(layer: RowLayer, first: tuple[Place, ...], *, has: tuple[str, ...]) -> DiagramFigure:
    places = [*first]
    each = zip(layer.inputs, layer.parts, layer.partial_sums, strict=True)
    for rank, (x, part, output) in enumerate(each):
        group, kind = f"rank {rank}", rank + 1
        made: dict[str, tuple[str, Tile]] = {
            "x": (f"X{rank}", block(f"x{rank}", f"X{rank}", x, kind=kind)),
            "w": (f"W{rank}", block(f"w{rank}", f"W{rank}", part, kind=kind)),
            "y": (f"X{rank} W{rank}", _partial(rank, output, origin=f"w{rank}")),
        }
        places += [place(made[name][0], group, [made[name][1]]) for name in has]
    return DiagramFigure(kinds=kinds_of(layer.degree), places=tuple(places))


def _partial(rank: int, output: Matrix, *, origin: str = "") -> Tile:
    name = f"partial sum of rank {rank}"
    return block(f"y{rank}", name, output, kind=rank + 1, state="part", origin=origin)


def _compared(layer: RowLayer) -> tuple[Place, ...]:
    whole = product(beside(layer.inputs), layer.weight)
    tiles = [block("whole", "Y as one device computes it", whole, kind=0)]
    return (place("Y = X W", "one device, to compare", tiles, shape_text(whole)),)


def _summed(layer: RowLayer) -> DiagramFigure:
    n, total = layer.degree, added(layer.partial_sums)
    places: list[Place] = []
    for rank, output in enumerate(layer.partial_sums):
        own = block(f"total{rank}", "the whole sum", total, kind=0, origin=f"y{rank}")
        places.append(place(f"X{rank} W{rank}", f"rank {rank}", [_partial(rank, output)]))
        places.append(place("Y", f"rank {rank}", [own], shape_text(total)))
    moves = tuple(
        Move(
            source=f"y{rank}",
            target=f"total{other}",
            words=f"the part of rank {rank} is added into the sum of rank {other}",
        )
        for rank in range(n)
        for other in range(n)
        if other != rank
    )
    return DiagramFigure(kinds=kinds_of(n), places=tuple(places), moves=moves)
