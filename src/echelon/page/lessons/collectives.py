# SPDX-License-Identifier: Apache-2.0
"""Collectives as four ranks recorded them: four side by side, and one by four algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.core.plan import DTYPE_BYTES
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.all_reduce import SumGroup
from echelon.cost.bytes.terms import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    reduce_scatter_bytes,
)
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
from echelon.page.lessons.traces import read_trace
from echelon.planner.view.document import DataTable, Fact

ALL_TO_ALL = "all-to-all"
State = tuple[Mapping[int, int], ...]
"""What each rank has: its numbers by their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMessage:
    """Hold a message: its numbers are added to those from place `start` on, or replace them."""

    round: int
    source: int
    target: int
    start: int
    values: tuple[int, ...]
    adds: bool

    @property
    def places(self) -> range:
        """Return the places of its numbers."""
        return range(self.start, self.start + len(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCollective:
    """Hold one collective: what ranks gave and got, their messages, the bytes each sent."""

    name: str
    given: tuple[tuple[int, ...], ...]
    got: tuple[tuple[int, ...], ...]
    messages: tuple[RecordedMessage, ...]
    bytes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Return how many ranks took part."""
        return len(self.given)

    @property
    def num_rounds(self) -> int:
        """Return in how many rounds, one after the other, all messages were sent."""
        return 1 + max(message.round for message in self.messages)

    def round(self, number: int) -> tuple[RecordedMessage, ...]:
        """Return the messages of one round."""
        return tuple(one for one in self.messages if one.round == number)

    def states(self) -> tuple[State, ...]:
        """Return what ranks had at first and after each round; not of an all-to-all.

        A rank that gave one number has it at its own place.
        """
        now = [
            {(place if len(numbers) > 1 else rank): one for place, one in enumerate(numbers)}
            for rank, numbers in enumerate(self.given)
        ]
        found: list[State] = [tuple(dict(one) for one in now)]
        for number in range(self.num_rounds):
            for one in self.round(number):
                for place, value in zip(one.places, one.values, strict=True):
                    there = now[one.target].get(place, 0) if one.adds else 0
                    now[one.target][place] = there + value
            found.append(tuple(dict(one) for one in now))
        return tuple(found)


def recorded_collective(name: str) -> RecordedCollective:
    """Return a collective, or an algorithm of an all-reduce, by its name, such as ``tree``."""
    found = read_trace("collectives")[name]
    return RecordedCollective(
        name=name,
        given=tuple(map(tuple, found["given"])),
        got=tuple(map(tuple, found["got"])),
        bytes=tuple(found["bytes"]),
        messages=tuple(
            RecordedMessage(
                round=one["round"],
                source=one["from"],
                target=one["to"],
                start=one["start"],
                values=tuple(one["values"]),
                adds=one["adds"],
            )
            for one in found["messages"]
        ),
    )


def round_board(
    run: RecordedCollective, number: int, state: State, nodes: Sequence[int] = ()
) -> DiagramFigure:
    """Return what ranks have after `number` rounds, with the messages of the last one.

    Ranks stand in the boxes of their `nodes`, where these matter.
    """
    messages = run.round(number - 1)
    came = {(one.target, place): one.source for one in messages for place in one.places}
    total = totals(run)
    return DiagramFigure(
        kinds=tuple(f"place {place}" for place in range(run.num_ranks)),
        places=tuple(
            Place(
                label=f"rank {rank}",
                note="",
                tiles=tuple(
                    _tile(rank, place, numbers[place], total, came.get((rank, place)))
                    for place in sorted(numbers)
                ),
                group=f"node {nodes[rank]}" if nodes else "",
            )
            for rank, numbers in enumerate(state)
        ),
        moves=tuple(
            message_move(one, f"{one.source}.{one.start}", f"{one.target}.{one.start}")
            for one in messages
        ),
    )


def message_move(one: RecordedMessage, source: str, target: str) -> Move:
    """Return the arrow of a message between two tiles."""
    does = "added to" if one.adds else "kept in"
    numbers = ", ".join(map(str, one.values))
    places = ", ".join(map(str, one.places))
    where = f"{does} place{'s' * (len(one.values) > 1)} {places}"
    words = f"rank {one.source} sends {numbers} to rank {one.target}, {where}"
    return Move(source, target, words)


def totals(run: RecordedCollective) -> dict[int, int]:
    """Return what a place has when it is complete: a sum, or the piece itself."""
    if run.name == "all-gather":
        return {rank: numbers[0] for rank, numbers in enumerate(run.given)}
    return {place: sum(column) for place, column in enumerate(zip(*run.given, strict=True))}


def _tile(rank: int, place: int, value: int, total: dict[int, int], source: int | None) -> Tile:
    complete = value == total[place]
    state: TileState = "whole" if complete else "part"
    return Tile(
        id=f"{rank}.{place}",
        label=str(value),
        words=f"place {place}, {'complete' if complete else 'a part of the sum'}",
        kind=place,
        state=state,
        row=place,
        origin="" if source is None else f"{source}.{place}",
    )


NAMES = ("all-reduce", "all-gather", "reduce-scatter", ALL_TO_ALL)
RANKS = 4  # ranks that recorded
BYTES = DTYPE_BYTES["fp32"]
_CONTROLS = (LessonControl(name="collective", label="collective", values=NAMES),)
_FIRST = {
    "all-reduce": "Before: every rank has numbers of its own in four places. All want the sums. "
    "The digits of a sum tell whose numbers are in it: 1011 has those of ranks 0, 1 and 3.",
    "all-gather": "Before: every rank has one piece. All want all pieces.",
    "reduce-scatter": "Before: every rank has numbers of its own in four places. Rank i wants the "
    "sum of place i alone. The digits of a sum tell whose numbers are in it.",
    ALL_TO_ALL: "Before: every rank has a number for each rank: 31 is from rank 3, for rank 1.",
}
_USED = {
    "all-reduce": "sums of gradients in data parallelism, of activations in tensor parallelism",
    "all-gather": "parameters under ZeRO, rows under sequence parallelism",
    "reduce-scatter": "gradients under ZeRO, rows under sequence parallelism",
    ALL_TO_ALL: "tokens that go to their experts and back",
}

_RECORDED = {
    "ring": "all-reduce",
    "halving-doubling": "halving-doubling",
    "tree": "tree",
    "hierarchical": "hierarchical",
}
"""What the recording of each algorithm is called."""
ALGORITHMS = tuple(_RECORDED)
_ALGORITHM_CONTROLS = (
    LessonControl(name="algorithm", label="algorithm", values=ALGORITHMS, start=1),
)
_DOES = {
    "ring": "A quarter at a time goes around: first to be added, then to be kept. Every link is "
    "busy in every round.",
    "halving-doubling": "Pairs exchange halves of what is left and add; then they go the way back. "
    "Few rounds, and as many bytes as a ring.",
    "tree": "Whole tensors go up a tree to rank 0, which has the sum, and down again. Few rounds, "
    "many bytes: for small tensors.",
    "hierarchical": "First inside of a node, then between nodes with what is left, then inside "
    "again. Few bytes on the slow links.",
}


def four_collectives() -> Lesson:
    """Return the lesson: a scene for each collective, a frame for each round of messages."""
    return Lesson(
        id="collectives",
        topic="What ranks send",
        title="Four collectives, message by message",
        rows=("M24",),
        summary=(
            "All-reduce, all-gather and reduce-scatter go around a ring, a neighbour at a time; "
            "an all-to-all goes between all pairs at once."
        ),
        source=(
            "messages that four ranks recorded while our own ring algorithms and our exchange ran "
            "over Gloo; bytes by the formulas of the planner"
        ),
        controls=_CONTROLS,
        scenes=tuple(_scene(recorded_collective(name)) for name in NAMES),
        corrections=corrections("llm-training-64", "llm-training-65", "distributed-18"),
    )


def bytes_by_formula(name: str, degree: int = RANKS) -> int:
    """Return what a rank sends where a whole buffer has as many fp32 numbers as there are ranks."""
    formulas = {
        "all-reduce": all_reduce_bytes(degree * BYTES, degree),
        "all-gather": all_gather_bytes(BYTES, degree),
        "reduce-scatter": reduce_scatter_bytes(BYTES, degree),
        ALL_TO_ALL: all_to_all_bytes(degree * BYTES, degree),
    }
    return formulas[name]


def _scene(run: RecordedCollective) -> Scene:
    frames = _exchanged(run) if run.name == ALL_TO_ALL else _around(run)
    rows = [
        (
            name,
            str(recorded_collective(name).num_rounds),
            str(len(recorded_collective(name).messages)),
            decimal_bytes(bytes_by_formula(name)),
            _USED[name],
        )
        for name in NAMES
    ]
    head = ("collective", "rounds", "messages", "a rank sends", "used for")
    return Scene(frames=frames, table=DataTable.of(head, rows))


def _facts(run: RecordedCollective, rounds: int) -> tuple[Fact, ...]:
    mine = [one for one in run.messages if one.source == 0 and one.round < rounds]
    sent = BYTES * sum(len(one.values) for one in mine)
    messages = sum(one.round < rounds for one in run.messages)
    return (
        Fact(
            "rank 0 has sent",
            decimal_bytes(sent),
            f"{decimal_bytes(bytes_by_formula(run.name))} in the end: {_formula(run)}",
        ),
        Fact(
            "messages so far",
            f"{messages} of {len(run.messages)}",
            f"in {run.num_rounds} round{'s' * (run.num_rounds > 1)}",
        ),
    )


def _formula(run: RecordedCollective) -> str:
    whole = decimal_bytes(run.num_ranks * BYTES)
    share = "2 (N-1)/N" if run.name == "all-reduce" else "(N-1)/N"
    return f"{share} x M, M = {whole}"


def _around(run: RecordedCollective) -> tuple[Frame, ...]:
    captions = [_FIRST[run.name], *(_caption(run, number) for number in range(run.num_rounds))]
    return tuple(
        Frame(
            caption=caption, figures=(round_board(run, number, state),), facts=_facts(run, number)
        )
        for number, (caption, state) in enumerate(zip(captions, run.states(), strict=True))
    )


def _caption(run: RecordedCollective, number: int) -> str:
    adds = run.round(number)[0].adds
    does = (
        "sends a sum so far to the next rank, which adds its own number"
        if adds
        else "sends a finished piece to the next rank, which keeps it"
    )
    said = f"Round {number + 1} of {run.num_rounds}: every rank {does}."
    last = number + 1 == run.num_rounds
    turns = adds and not last and not run.round(number + 1)[0].adds
    if turns:
        said += " Now every rank has one complete sum: the reduce-scatter is over."
    elif last and run.name == "reduce-scatter":
        said += " Rank i has the whole sum of place i; what else is there is not needed any more."
    elif last:
        said += " All ranks have all of it."
    return said


def _exchanged(run: RecordedCollective) -> tuple[Frame, ...]:
    n = run.num_ranks
    pairs = n * (n - 1)
    after = (
        f"After one round: {pairs} messages between {pairs // 2} pairs, all at once. Rank i has "
        "what was for it from every rank; its own number stayed."
    )
    moves = tuple(
        message_move(one, f"{one.source}>{one.target} sent", f"{one.source}>{one.target}")
        for one in run.messages
    )
    return (
        Frame(
            caption=_FIRST[run.name],
            figures=(_pairs(run, run.given, received=False, moves=()),),
            facts=_facts(run, 0),
        ),
        Frame(
            caption=after,
            figures=(_pairs(run, run.got, received=True, moves=moves),),
            facts=_facts(run, 1),
        ),
    )


def _pairs(
    run: RecordedCollective,
    numbers: tuple[tuple[int, ...], ...],
    *,
    received: bool,
    moves: tuple[Move, ...],
) -> DiagramFigure:
    places: list[Place] = []
    for rank, row in enumerate(numbers):
        tiles = [_gone(run, rank, other) for other in range(len(row)) if received and other != rank]
        for other, value in enumerate(row):
            source, target = (other, rank) if received else (rank, other)
            tiles.append(_number(source, target, value, row=other, column=int(received)))
        places.append(Place(label=f"rank {rank}", note="", tiles=tuple(tiles)))
    return DiagramFigure(
        kinds=tuple(f"for rank {rank}" for rank in range(run.num_ranks)),
        places=tuple(places),
        moves=moves,
    )


def _number(source: int, target: int, value: int, *, row: int, column: int) -> Tile:
    return Tile(
        id=f"{source}>{target}",
        label=str(value),
        words=f"from rank {source}, for rank {target}",
        kind=target,
        row=row,
        column=column,
    )


def _gone(run: RecordedCollective, rank: int, target: int) -> Tile:
    """Return the place that a number has left."""
    return Tile(
        id=f"{rank}>{target} sent",
        label=str(run.given[rank][target]),
        words=f"sent to rank {target}",
        kind=target,
        state="gone",
        row=target,
    )


def all_reduce_algorithms() -> Lesson:
    """Return the lesson: a scene for each algorithm, a frame for each round."""
    return Lesson(
        id="all-reduce",
        topic="What ranks send",
        title="One sum, four algorithms",
        rows=("M24",),
        summary=(
            "The same four tensors are summed by a ring, by halves, up and down a tree, and node "
            "by node. All give the same sums; rounds and bytes differ."
        ),
        source=(
            "messages that four ranks recorded while our own algorithms ran over Gloo; bytes by "
            "the formulas that plans are priced by"
        ),
        controls=_ALGORITHM_CONTROLS,
        scenes=tuple(_algorithm_scene(name) for name in ALGORITHMS),
        commands=(
            "echelon plan nano --set mesh.dp_replicate=4 --set mesh.dp_shard=1 "
            "--set collectives.algorithm=ring",
        ),
    )


def member(algorithm: str, rank: int) -> SumGroup:
    """Return a member of the group: all on one node, or two on each where nodes matter."""
    each = 2 if algorithm == "hierarchical" else RANKS
    return SumGroup(
        algorithm=algorithm, place=rank, nodes=tuple(one // each for one in range(RANKS))
    )


def _algorithm_scene(algorithm: str) -> Scene:
    run = recorded_collective(_RECORDED[algorithm])
    nodes = member(algorithm, 0).nodes if algorithm == "hierarchical" else ()
    frames = tuple(
        Frame(
            caption=_algorithm_caption(algorithm, run, number),
            figures=(round_board(run, number, state, nodes),),
            facts=_algorithm_facts(algorithm, run, number),
        )
        for number, state in enumerate(run.states())
    )
    return Scene(frames=frames, table=_table())


def _algorithm_caption(algorithm: str, run: RecordedCollective, number: int) -> str:
    if number == 0:
        return f"Before: every rank has numbers of its own in four places. {_DOES[algorithm]}"
    messages = run.round(number - 1)
    added = sum(one.adds for one in messages)
    kinds = {
        len(messages): "and what comes is added",
        0: "and what comes is complete",
    }
    said = kinds.get(added, "some to be added and some complete")
    count = f"{len(messages)} message{'s' * (len(messages) > 1)}"
    end = " All ranks have all sums." if number == run.num_rounds else ""
    return f"Round {number} of {run.num_rounds}: {count}, {said}.{end}"


def _algorithm_facts(algorithm: str, run: RecordedCollective, rounds: int) -> tuple[Fact, ...]:
    sent = [0] * RANKS
    for one in run.messages:
        if one.round < rounds:
            sent[one.source] += BYTES * len(one.values)
    told = [member(algorithm, rank).bytes(RANKS, BYTES) for rank in range(RANKS)]
    return (
        Fact(
            "bytes that ranks have sent",
            ", ".join(map(str, sent)),
            f"{', '.join(map(str, told))} in the end, by the formula",
        ),
        Fact(
            "messages so far",
            f"{sum(one.round < rounds for one in run.messages)} of {len(run.messages)}",
            f"in {run.num_rounds} rounds",
        ),
    )


def _table() -> DataTable:
    rows: list[tuple[str, ...]] = []
    for algorithm in ALGORITHMS:
        run = recorded_collective(_RECORDED[algorithm])
        near, far = member(algorithm, 0).bytes_by_tier(RANKS, BYTES)
        rows.append(
            (
                algorithm,
                str(run.num_rounds),
                str(len(run.messages)),
                decimal_bytes(near + far),
                decimal_bytes(far),
            )
        )
    head = ("algorithm", "rounds", "messages", "rank 0 sends", "of that to another node")
    return DataTable.of(head, rows)
