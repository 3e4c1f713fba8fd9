# SPDX-License-Identifier: Apache-2.0
"""A linear layer cut by columns and by rows, in five steps each, with numbers that add up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

from echelon.core.parameters import ParameterSpec
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Frame,
    Lesson,
    Move,
    Place,
    Scene,
    Tile,
    choices,
)
from echelon.page.lessons.matrices import (
    EVERYWHERE,
    Matrix,
    added,
    beside,
    block,
    columns_of,
    cut,
    degree_control,
    dot_text,
    filled,
    gather_fact,
    kinds_of,
    mlp_weights,
    nothing_sent,
    numel,
    place,
    product,
    shape_text,
    sum_fact,
    sum_text,
    weights_fact,
)
from echelon.planner.view.document import Fact

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
                caption=f"Step 2: W is cut by columns. Rank i gets W0 to W{n - 1} by its "
                f"number, {shapes[1]}.",
                figures=(_figure(layer, (), has=("x", "w")),),
                facts=(held, nothing_sent()),
            ),
            Frame(
                caption=f"Step 3: each rank multiplies what it has: {shapes[0]} x {shapes[1]} = "
                f"{shapes[2]}. Nobody waits for anybody.",
                figures=(_figure(layer, (), has=("x", "w", "y")),),
                facts=(
                    Fact(
                        "first number of Y0", str(numbers[0][0]), dot_text(layer.x, layer.parts[0])
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
                        "equal to one device",
                        "yes" if same else "no",
                        f"{numel(whole)} numbers, each complete on one rank",
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
            f"y{rank}-{rank}",
            f"y{rank}-{other}",
            f"Y{rank} is copied from rank {rank} to rank {other}",
        )
        for rank, other in permutations(range(n), 2)
    )
    return DiagramFigure(kinds=kinds_of(n), places=tuple(places), moves=moves)


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
        scenes=tuple(_row_scene(row_layer(int(one["ranks"]))) for one in choices(_CONTROLS)),
        corrections=corrections("distributed-12", "distributed-18"),
    )


def _row_scene(layer: RowLayer) -> Scene:
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
                figures=(_row_figure(layer, _whole_weight(layer), has=("x",)),),
                facts=(weights_fact(0, numel(layer.weight)), nothing_sent()),
            ),
            Frame(
                caption=f"Step 2: W, {shape_text(layer.weight)}, is cut by rows, {shapes[1]} each: "
                "a row belongs to the feature of the input that it multiplies.",
                figures=(_row_figure(layer, (), has=("x", "w")),),
                facts=(held, nothing_sent()),
            ),
            Frame(
                caption=f"Step 3: each rank multiplies what it has: {shapes[0]} x {shapes[1]} = "
                f"{shapes[2]}, as large as the whole output.",
                figures=(_row_figure(layer, (), has=("x", "w", "y")),),
                facts=(nothing_sent(),),
            ),
            Frame(
                caption=f"Step 4: no number is complete. Each rank has one of {n} summands of "
                "every number (hatched), and only their sum is what one device computes.",
                figures=(_row_figure(layer, _row_compared(layer), has=("y",)),),
                facts=(
                    Fact("first number of Y", str(total[0][0]), corner),
                    Fact(
                        "sum equal to one device",
                        "yes" if same else "no",
                        f"all {numel(total)} numbers",
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


def _row_figure(
    layer: RowLayer, first: tuple[Place, ...], *, has: tuple[str, ...]
) -> DiagramFigure:
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


def _row_compared(layer: RowLayer) -> tuple[Place, ...]:
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
            f"y{rank}",
            f"total{other}",
            f"the part of rank {rank} is added into the sum of rank {other}",
        )
        for rank, other in permutations(range(n), 2)
    )
    return DiagramFigure(kinds=kinds_of(n), places=tuple(places), moves=moves)
