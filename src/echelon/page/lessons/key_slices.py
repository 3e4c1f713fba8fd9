# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a long sequence, cut along the sequence or by layers: what a rank holds."""

from __future__ import annotations

from echelon.config.cluster.settings import read_typed_cluster
from echelon.core.attention_mask import Placement
from echelon.core.mesh import Mesh
from echelon.core.units import GIB, binary_bytes, decimal_bytes
from echelon.cost.bytes.model_sizes import kv_bytes
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
from echelon.planner.view.document import BarRow, BarsFigure, DataTable, Fact

# A model of 70B parameters at 128k positions.
POSITIONS = 131_072
HIDDEN = 8192
LAYERS = 80
HEADS = 64
RANKS = (2, 4, 8)  # context ranks
KEY_HEADS = {"64 of 64 heads": 64, "8 of 64 heads": 8}
TABLED = (1, 2, 4, 8, 16, 32, 64)
"""Ranks of the table and of the bars."""
DEVICE = "h100"
SQUARE = max(RANKS)
"""Rows and columns of the drawing: layers down, positions across."""

_CONTROLS = (
    LessonControl(
        name="ranks", label="context ranks N", values=tuple(map(str, RANKS)), start=RANKS.index(8)
    ),
    LessonControl(name="keys", label="heads that have keys", values=tuple(KEY_HEADS)),
)
_AXES = "down: layers, across: positions"


def key_slices() -> Lesson:
    """Return the lesson: one cut at a time, and what remains for a rank."""
    return Lesson(
        id="key-slices",
        topic="Long sequences",
        title="Keys and values, sliced along the sequence",
        rows=("M21", "F11"),
        summary=(
            "Keys and values have a row for each position in each layer. Context ranks cut along "
            "the positions, pipeline ranks by layers."
        ),
        source="the formula of keys and values that echelon explain memory prints",
        controls=_CONTROLS,
        scenes=tuple(
            _scene(int(one["ranks"]), KEY_HEADS[one["keys"]]) for one in choices(_CONTROLS)
        ),
        corrections=corrections(
            "llm-training-09",
            "llm-training-10",
            "llm-training-56",
            "llm-training-57",
            "llm-training-58",
        ),
        commands=("echelon explain context nano --set mesh.cp=4",),
    )


def held(ranks: int, key_heads: int, *, layers: int = LAYERS) -> float:
    """Return the bytes of keys and values that each of so many context ranks holds."""
    return kv_bytes(POSITIONS, HIDDEN * key_heads // HEADS, layers) / ranks


def _scene(ranks: int, key_heads: int) -> Scene:
    rows = tuple(
        (
            str(n),
            binary_bytes(held(n, key_heads)),
            decimal_bytes(held(n, key_heads)),
            binary_bytes(held(n, key_heads, layers=1)),
        )
        for n in TABLED
    )
    return Scene(
        frames=(
            _whole(key_heads),
            _by_layers(ranks, key_heads),
            _by_positions(ranks, key_heads),
            _exchange(ranks, key_heads),
            _per_rank(ranks, key_heads),
        ),
        table=DataTable(
            head=("N", "a rank, all layers", "in GB", "a rank, one layer"),
            rows=rows,
            right=tuple(range(4)),
        ),
    )


def _whole(key_heads: int) -> Frame:
    whole, memory = held(1, key_heads), _memory()
    tile = _slice("all", "all", "all layers, all positions", 0, (0, 0, SQUARE, SQUARE))
    fits = "fit" if whole <= memory else "do not fit"
    return Frame(
        caption=(
            f"{POSITIONS:,} positions in {LAYERS} layers: keys and values take "
            f"{binary_bytes(whole)}. They {fits} the {decimal_bytes(memory)} of one device."
        ),
        figures=(
            _figure(("one device",), (Place(label="one device", note=_AXES, tiles=(tile,)),)),
        ),
        facts=(
            Fact(
                "keys and values",
                binary_bytes(whole),
                f"2 x {POSITIONS:,} x {HIDDEN * key_heads // HEADS:,} x {LAYERS} x 2 bytes",
            ),
            Fact("of one layer", binary_bytes(held(1, key_heads, layers=1))),
        ),
    )


def _by_layers(ranks: int, key_heads: int) -> Frame:
    each, rows = LAYERS // Mesh(pp=ranks).pp, SQUARE // ranks
    tiles = tuple(
        _slice(
            f"slice {rank}",
            f"layers {rank * each}-{(rank + 1) * each - 1}",
            f"pipeline rank {rank}",
            rank,
            (rank * rows, 0, rows, SQUARE),
        )
        for rank in range(ranks)
    )
    return Frame(
        caption=(
            f"A pipeline cuts by layers: each rank has all positions of {each} layers. A longer "
            "sequence makes every part longer."
        ),
        figures=(_figure(_ranks(ranks), (Place(label="by layers", note=_AXES, tiles=tiles),)),),
        facts=(Fact("a pipeline rank holds", binary_bytes(held(ranks, key_heads))),),
    )


def _by_positions(ranks: int, key_heads: int) -> Frame:
    columns = SQUARE // ranks
    tiles = tuple(
        _slice(
            f"slice {rank}",
            str(rank),
            f"context rank {rank}: positions {_positions(ranks, rank)}",
            rank,
            (0, rank * columns, SQUARE, columns),
        )
        for rank in range(ranks)
    )
    return Frame(
        caption=(
            f"Context parallelism cuts along the sequence: each rank has {POSITIONS // ranks:,} "
            "positions of all layers. A longer sequence takes more ranks, not more memory of each."
        ),
        figures=(_figure(_ranks(ranks), (Place(label="by positions", note=_AXES, tiles=tiles),)),),
        facts=(
            Fact("positions of a rank", f"{POSITIONS // ranks:,}"),
            Fact("a context rank holds", binary_bytes(held(ranks, key_heads))),
        ),
    )


def _exchange(ranks: int, key_heads: int) -> Frame:
    places = tuple(
        Place(
            label=f"rank {rank}",
            note="",
            tiles=(
                _slice(f"slice {rank}", f"{rank}", "its own slice", rank, (0, 0, 3, 1)),
                _slice(
                    f"visit {rank}",
                    f"{(rank + 1) % ranks}",
                    f"one layer of the slice of rank {(rank + 1) % ranks}, visiting",
                    (rank + 1) % ranks,
                    (0, 1, 1, 1),
                ),
            ),
        )
        for rank in range(ranks)
    )
    moves = tuple(
        Move(
            f"slice {(rank + 1) % ranks}",
            f"visit {rank}",
            f"Rank {(rank + 1) % ranks} sends its keys of one layer to rank {rank}.",
        )
        for rank in range(ranks)
    )
    layer = held(ranks, key_heads, layers=1)
    return Frame(
        caption=(
            "In each layer, queries must meet the keys of all slices: these go around a ring, one "
            "layer of one slice at a time."
        ),
        figures=(_figure(_ranks(ranks), places, moves),),
        facts=(
            Fact(
                "one layer of a slice",
                binary_bytes(layer),
                f"{binary_bytes(held(1, key_heads, layers=1))} / {ranks}",
            ),
            Fact("rotations in each layer", str(ranks - 1)),
        ),
    )


def _per_rank(ranks: int, key_heads: int) -> Frame:
    limit = _memory()
    rows = tuple(_bar(n, key_heads, limit) for n in TABLED)
    whole = held(1, key_heads) / GIB
    return Frame(
        caption=f"A rank holds {whole:g}/N GiB: more ranks, longer sequences.",
        figures=(
            BarsFigure(
                kinds=("keys and values",),
                limit=limit,
                limit_text=f"{decimal_bytes(limit)} of an {DEVICE.upper()}",
                rows=rows,
            ),
        ),
        facts=(
            Fact(
                "a rank, all layers",
                binary_bytes(held(ranks, key_heads)),
                f"{whole:g} GiB / {ranks}",
            ),
            Fact(
                "a rank, one layer",
                binary_bytes(held(ranks, key_heads, layers=1)),
                f"{binary_bytes(held(1, key_heads, layers=1))} / {ranks}",
            ),
        ),
    )


def _bar(ranks: int, key_heads: int, limit: float) -> BarRow:
    value = held(ranks, key_heads)
    return BarRow(
        label=f"N = {ranks}",
        values=(value,),
        texts=(binary_bytes(value),),
        total=value,
        total_text=binary_bytes(value),
        share_text=f"{100 * value / limit:.0f} %",
        over=value > limit,
    )


def _slice(name: str, label: str, words: str, kind: int, box: tuple[int, int, int, int]) -> Tile:
    row, column, rows, columns = box
    return Tile(name, label, words, kind, row=row, column=column, rows=rows, columns=columns)


def _figure(
    kinds: tuple[str, ...], places: tuple[Place, ...], moves: tuple[Move, ...] = ()
) -> DiagramFigure:
    return DiagramFigure(kinds=kinds, places=places, moves=moves)


def _ranks(ranks: int) -> tuple[str, ...]:
    return tuple(f"rank {rank}" for rank in range(ranks))


def _positions(ranks: int, rank: int) -> str:
    placed = Placement(kind="contiguous", ring_degree=ranks, ulysses_degree=1, length=POSITIONS)
    (run,) = placed.ring_runs(rank)
    return f"{run.start:,} to {run.position(run.count - 1):,}"


def _memory() -> float:
    return float(read_typed_cluster(f"1x{DEVICE}", "a lesson").device.memory_bytes)
