# SPDX-License-Identifier: Apache-2.0
"""Ring attention as four ranks recorded it: who sends which keys to whom, and which pairs meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from echelon.config.cluster.settings import read_typed_cluster
from echelon.core.attention_mask import AttentionMask, Placement
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import kv_bytes, model_states
from echelon.layout.context_work import pairs_by_place
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
)
from echelon.page.lessons.traces import read_trace
from echelon.planner.view.document import BarRow, BarsFigure, DataTable, Fact, HeatFigure, HeatRow

# The model of which the last step tells bytes: a Llama 7B, and 128k positions.
POSITIONS = 131_072
HIDDEN = 4096
LAYERS = 32
WEIGHTS = 7e9
DEVICE = "a100-80gb"
ARRIVES = 4  # the row of keys that arrive, below one that is left to arrows
CASES = ("no mask, zigzag", "causal, zigzag")
"""Cases of the recording, the simpler one first."""


@dataclass(frozen=True)
class RingRecord:
    """Hold what the ranks of one case recorded."""

    chunks: tuple[tuple[int, ...], ...]
    ranks: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, case: dict[str, Any]) -> RingRecord:
        """Return the record of a case of the file."""
        return cls(tuple(map(tuple, case["chunks"])), tuple(case["ranks"]))

    @property
    def steps(self) -> int:
        """Return the steps of the ring: as many as ranks."""
        return len(self.ranks)

    def met(self, step: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return what a step computed: rank, chunk of queries, chunk of keys, pairs."""
        return tuple(
            (rank, *pairs)
            for rank, noted in enumerate(self.ranks)
            for pairs in noted["met"][step]["pairs"]
        )

    def messages(self, step: int) -> tuple[tuple[int, int, tuple[int, ...], int], ...]:
        """Return what brought the keys of a step: source, target, positions, bytes."""
        return tuple(
            (rank, one["to"], tuple(one["positions"]), one["bytes"])
            for rank, noted in enumerate(self.ranks)
            for one in noted["sent"]
            if one["step"] == step
        )

    def owner(self, positions: Sequence[int]) -> int:
        """Return the rank whose keys lie at positions."""
        return next(rank for rank, one in enumerate(self.ranks) if positions[0] in one["own"])

    @cached_property
    def chunk_owners(self) -> tuple[int, ...]:
        """Return the rank that has each chunk."""
        return tuple(self.owner(chunk) for chunk in self.chunks)

    def blocks(self, last_step: int) -> int:
        """Return how often the queries of a rank have met keys of a rank, up to a step."""
        pairs = {
            (rank, self.chunk_owners[keys])
            for step in range(last_step + 1)
            for rank, _, keys, _ in self.met(step)
        }
        return len(pairs)

    def work(self) -> list[int]:
        """Return the pairs of positions that each rank computed."""
        counted = Counter[int]()
        for step in range(self.steps):
            for rank, _, _, pairs in self.met(step):
                counted[rank] += pairs
        return [counted[rank] for rank in range(len(self.ranks))]


def ring_attention() -> Lesson:
    """Return the lesson: four steps of a ring as they were recorded, and what it is good for."""
    trace = read_trace("ring")
    cases = {name: RingRecord.read(trace["cases"][name]) for name in CASES}
    return Lesson(
        id="ring-attention",
        topic="Long sequences",
        title="Ring attention: queries stay, keys and values go around",
        rows=("M19",),
        summary=(
            "Each rank keeps its queries. Keys and values go from rank to rank until each query "
            "has met each key that it may see, exactly once."
        ),
        source="what four ranks recorded of this project's ring attention on 16 positions",
        controls=(LessonControl(name="case", label="mask, order", values=tuple(cases)),),
        scenes=tuple(_scene(name, record, trace["positions"]) for name, record in cases.items()),
        corrections=corrections("llm-training-47", "llm-training-48", "llm-training-44"),
        commands=("echelon explain context nano --set mesh.cp=4",),
    )


def _scene(name: str, record: RingRecord, positions: int) -> Scene:
    steps = range(record.steps)
    causal = name.startswith("causal")
    rows = tuple(
        (str(step), str(source), str(target), positions_text(sent), str(size))
        for step in steps
        for source, target, sent, size in record.messages(step)
    )
    return Scene(
        frames=(*(_step(record, step) for step in steps), _end(record, causal, positions)),
        table=DataTable(
            head=("for step", "from rank", "to rank", "positions", "bytes"),
            rows=rows,
            right=(0, 1, 2, 4),
        ),
    )


def _step(record: RingRecord, step: int) -> Frame:
    ranks = len(record.ranks)
    total = record.blocks(record.steps - 1)
    met = record.blocks(step)
    said = (
        f"Each rank has only met its own keys: {met} of {total} blocks. Without a ring, the other "
        f"{total - met} would be missing."
        if step == 0
        else f"Rotation {step} of {record.steps - 1}: keys came from the neighbour, and the parked "
        f"queries met them. {met} of {total} blocks are there."
    )
    next_keys = record.messages(step + 1)
    coming = " The next keys are on their way while these are met." if next_keys else ""
    pairs = sum(one[3] for number in range(step + 1) for one in record.met(number))
    return Frame(
        caption=said + coming,
        figures=(_places(record, step), _grid(record, step)),
        facts=(
            Fact(
                "blocks that have met", f"{met} of {total}", "queries of a rank with keys of a rank"
            ),
            Fact("pairs of positions computed", f"{pairs} of {sum(record.work())}"),
            Fact(
                "blocks of keys on a rank",
                str(1 + (step > 0) + bool(next_keys)),
                "its own" + ", one visiting" * (step > 0) + ", one arriving" * bool(next_keys),
            ),
            Fact(
                "bytes sent so far, all ranks",
                str(sum(one[3] for n in range(step + 1) for one in record.messages(n))),
                f"{ranks} ranks, 16 positions, one head of 4 numbers in fp64",
            ),
        ),
    )


def _places(record: RingRecord, step: int) -> DiagramFigure:
    """Return the ranks with their queries, their keys, those that visit and those that come."""
    ranks = range(len(record.ranks))
    kinds = ("queries", *(f"keys of rank {rank}" for rank in ranks))
    visiting = {target: sent for _, target, sent, _ in record.messages(step)}
    coming = {target: sent for _, target, sent, _ in record.messages(step + 1)}
    places: list[Place] = []
    for rank, noted in enumerate(record.ranks):
        own = tuple(noted["own"])
        tiles = [
            _tile(f"q{rank}", own, 0, 0, "queries"),
            _tile(f"own{rank}", own, 1 + rank, 1, "its own keys and values"),
        ]
        if rank in visiting:
            sent = visiting[rank]
            owner = record.owner(sent)
            words = f"visiting keys of rank {owner}"
            tiles.append(_tile(f"visit{owner}", sent, 1 + owner, 2, words))
        if rank in coming:
            sent = coming[rank]
            owner = record.owner(sent)
            words = f"keys of rank {owner}, on their way"
            tiles.append(_tile(f"in{rank}", sent, 1 + owner, ARRIVES, words, gone=True))
        places.append(Place(label=f"rank {rank}", note="", tiles=tuple(tiles)))
    moves = tuple(
        Move(
            f"visit{record.owner(sent)}" if step else f"own{source}",
            f"in{target}",
            f"Rank {source} sends keys and values of positions {positions_text(sent)} to rank "
            f"{target}: {size} bytes.",
        )
        for source, target, sent, size in record.messages(step + 1)
        if step == 0 or source in visiting
    )
    return DiagramFigure(kinds=kinds, places=tuple(places), moves=moves)


def _tile(
    name: str, positions: Sequence[int], kind: int, row: int, words: str, *, gone: bool = False
) -> Tile:
    text = positions_text(positions)
    return Tile(
        id=name,
        label=f"{'Q' if kind == 0 else 'K V'} {text}",
        words=f"{words}, positions {text}",
        kind=kind,
        state="gone" if gone else "whole",
        row=row,
    )


def _grid(record: RingRecord, step: int) -> HeatFigure:
    """Return which chunks have met, with the number of the step in which they did."""
    found = {
        (queries, keys): number
        for number in range(step + 1)
        for _, queries, keys, _ in record.met(number)
    }
    names = [positions_text(chunk) for chunk in record.chunks]
    rows: list[HeatRow] = []
    for queries, name in enumerate(names):
        cells = [found.get((queries, keys)) for keys in range(len(names))]
        values = tuple(None if cell is None else 1.0 + (cell == step) for cell in cells)
        texts = tuple("" if cell is None else str(cell) for cell in cells)
        owner = record.chunk_owners[queries]
        rows.append(HeatRow(label=f"{name} (rank {owner})", values=values, texts=texts))
    return HeatFigure(
        columns=tuple(names),
        rows=tuple(rows),
        most=2.0,
        legend=(
            "Rows are positions of queries, columns those of keys. The number is the step in which "
            "they met; the latest step is dark."
        ),
    )


def _end(record: RingRecord, causal: bool, positions: int) -> Frame:
    ranks, work = len(record.ranks), record.work()
    contiguous = pairs_by_place(
        Placement(kind="contiguous", ring_degree=ranks, ulysses_degree=1, length=positions),
        AttentionMask(causal=causal),
    )
    return Frame(
        caption=(
            "Every pair that the mask allows was computed exactly once. With keys of a long "
            f"sequence, one device is over its memory, and each of {ranks} ranks is far below it."
        ),
        figures=(_capacity(ranks), _grid(record, record.steps - 1)),
        facts=(
            Fact("pairs computed, rank by rank", ", ".join(map(str, work)), "as recorded"),
            Fact(
                "with chunks in a row they would be",
                ", ".join(map(str, contiguous)),
                "positions 0 to 3 on rank 0, and so on",
            ),
            Fact("rotations", str(record.steps - 1)),
        ),
    )


def _capacity(ranks: int) -> BarsFigure:
    """Return what keys of a long sequence take beside weights and gradients, alone and shared."""
    limit = float(read_typed_cluster(f"1x{DEVICE}", "a lesson").device.memory_bytes)
    states = model_states(WEIGHTS, 0, 1)
    weights, gradients = states.parameters, states.gradients
    whole = kv_bytes(POSITIONS, HIDDEN, LAYERS)
    # One block of keys is at work and one arrives: those of one layer.
    passing = 2 * kv_bytes(POSITIONS // ranks, HIDDEN, 1)
    rows = (
        ("one device", (weights, gradients, float(whole), 0.0)),
        (f"one of {ranks} ranks", (weights, gradients, whole / ranks, float(passing))),
    )
    return BarsFigure(
        kinds=("weights", "gradients", "its keys and values", "keys that visit and arrive"),
        limit=limit,
        limit_text=f"{decimal_bytes(limit)} of an {DEVICE.upper()}",
        rows=tuple(
            BarRow(
                label=label,
                values=values,
                texts=tuple(map(decimal_bytes, values)),
                total=sum(values),
                total_text=decimal_bytes(sum(values)),
                share_text=f"{100 * sum(values) / limit:.0f} %",
                over=sum(values) > limit,
            )
            for label, values in rows
        ),
    )


def positions_text(positions: Sequence[int]) -> str:
    """Return positions with those in a row as ranges: ``0-1 14-15``."""
    runs = groupby(enumerate(sorted(positions)), lambda pair: pair[1] - pair[0])
    spans = [[position for _, position in run] for _, run in runs]
    return " ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in spans)
