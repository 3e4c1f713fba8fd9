# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism as four ranks recorded it: experts move once, tokens twice in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echelon.cost.bytes.model_sizes import expert_message_bytes
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
from echelon.planner.view.document import DataTable, Fact

DISPATCH, COMBINE = "experts.dispatch", "experts.combine"
ELEMENT_BYTES = 8
"""The ranks recorded in fp64."""
# Rows of a rank: its expert is in the first. One before each of these is left to arrows.
HOME = 2
ARRIVED = 4


@dataclass(frozen=True, slots=True)
class TravelRecord:
    """Hold what the ranks of one case recorded; expert e is on rank e."""

    hidden: int
    ranks: tuple[dict[str, Any], ...]

    @property
    def assignments(self) -> tuple[tuple[int, int, int], ...]:
        """Return each token with one of its experts: token, home rank, expert."""
        return tuple(
            (token, rank, expert)
            for rank, noted in enumerate(self.ranks)
            for token, chosen in zip(noted["tokens"], noted["chosen"], strict=True)
            for expert in chosen
        )

    def messages(self, name: str) -> tuple[tuple[int, int, tuple[int, ...], int], ...]:
        """Return the messages of a motion: source, target, tokens, bytes."""
        return tuple(
            (rank, one["to"], tuple(one["tokens"]), one["bytes"])
            for rank, noted in enumerate(self.ranks)
            for one in noted["sent"]
            if one["name"] == name
        )

    def sent_bytes(self, name: str) -> int:
        """Return the bytes of a motion, all ranks together."""
        return sum(size for *_, size in self.messages(name))

    @property
    def loads(self) -> list[int]:
        """Return how many tokens came to each expert."""
        return [len(noted["arrived"]) for noted in self.ranks]


def expert_travel() -> Lesson:
    """Return the lesson: six steps, the last three as they were recorded."""
    cases = {
        name: TravelRecord(case["hidden"], tuple(case["ranks"]))
        for name, case in read_trace("experts")["cases"].items()
    }
    return Lesson(
        id="expert-travel",
        topic="Experts",
        title="Experts stay on their ranks, tokens travel twice",
        rows=("M20",),
        summary=(
            "Each rank holds one expert. A router says which expert a token meets; the token is "
            "sent there, and what the expert made of it is sent back."
        ),
        source="what four ranks recorded of this project's router and token dispatcher",
        controls=(LessonControl(name="top", label="router", values=tuple(cases)),),
        scenes=tuple(_scene(record) for record in cases.values()),
        corrections=corrections(
            "llm-training-49", "llm-training-50", "llm-training-51", "llm-training-52"
        ),
        commands=("echelon explain experts mixtral-8x7b",),
    )


def _scene(record: TravelRecord) -> Scene:
    ways = {DISPATCH: "there", COMBINE: "back"}
    rows = tuple(
        (way, str(source), str(target), ", ".join(map(str, tokens)), str(size))
        for name, way in ways.items()
        for source, target, tokens, size in record.messages(name)
    )
    head = ("way", "from rank", "to rank", "tokens", "bytes")
    return Scene(
        frames=(
            _packed(record),
            _spread(record),
            _routed(record),
            _dispatched(record),
            _computed(record),
            _combined(record),
        ),
        table=DataTable(head=head, rows=rows, right=(1, 2, 4)),
    )


def _packed(record: TravelRecord) -> Frame:
    many = len(record.ranks)
    experts = tuple(_expert(number, column=number) for number in range(many))
    places = (Place(label="rank 0", note=f"{many} experts", tiles=experts),)
    return Frame(
        caption=(
            f"All {many} experts on one rank: it holds all their weights, though each token meets "
            "only a few of them."
        ),
        figures=(_figure(record, places),),
        facts=(Fact("experts of a rank", str(many)),),
    )


def _spread(record: TravelRecord) -> Frame:
    many = len(record.ranks)
    places = tuple(_place(record, rank, ()) for rank in range(many))
    return Frame(
        caption="Each expert moves to a rank of its own, whole: no matrix is cut.",
        figures=(_figure(record, places),),
        facts=(Fact("experts of a rank", "1", f"1/{many} of the experts' weights"),),
    )


def _routed(record: TravelRecord) -> Frame:
    return Frame(
        caption=(
            "Each rank routes its own tokens: the color of a token is that of the expert which "
            "the router chose."
        ),
        figures=(_figure(record, _tokens(record, at_home=True)),),
        facts=(
            Fact("tokens", str(sum(len(one["tokens"]) for one in record.ranks))),
            Fact(
                "tokens of each expert",
                ", ".join(map(str, record.loads)),
                "a router that is not balanced gives some experts more",
            ),
        ),
    )


def _dispatched(record: TravelRecord) -> Frame:
    return Frame(
        caption=(
            "First all-to-all, dispatch: each token is sent to the rank of its expert. One whose "
            "expert is at home stays."
        ),
        figures=(
            _figure(record, _tokens(record, at_home=False), _moves(record, DISPATCH, back=False)),
        ),
        facts=_travel_facts(record, DISPATCH),
    )


def _computed(record: TravelRecord) -> Frame:
    most, mean = max(record.loads), sum(record.loads) / len(record.ranks)
    return Frame(
        caption="Each expert computes with the tokens that came to it; the fullest takes longest.",
        figures=(_figure(record, _tokens(record, at_home=False)),),
        facts=(
            Fact("tokens of each expert", ", ".join(map(str, record.loads))),
            Fact(
                "the fullest, against the mean",
                f"{most / mean:.2f}",
                f"{most} of {mean:g} on average",
            ),
        ),
    )


def _combined(record: TravelRecord) -> Frame:
    return Frame(
        caption=(
            "Second all-to-all, combine: what experts made of the tokens is sent back the same "
            "way, and added up for each token."
        ),
        figures=(
            _figure(record, _tokens(record, at_home=True), _moves(record, COMBINE, back=True)),
        ),
        facts=_travel_facts(record, COMBINE),
    )


def _travel_facts(record: TravelRecord, name: str) -> tuple[Fact, ...]:
    many, ranks = len(record.assignments), len(record.ranks)
    moved = sum(len(tokens) for _, _, tokens, _ in record.messages(name))
    tokens = sum(len(one["tokens"]) for one in record.ranks) // ranks
    even = expert_message_bytes(
        tokens, record.hidden, many // (ranks * tokens), ranks, size=ELEMENT_BYTES
    )
    return (
        Fact(
            "rows that travel", f"{moved} of {many}", "the others meet an expert of their own rank"
        ),
        Fact(
            "bytes sent, all ranks",
            str(record.sent_bytes(name)),
            f"{moved} x {record.hidden} numbers x {ELEMENT_BYTES} bytes",
        ),
        Fact(
            "there and back, if experts were even",
            f"{ranks * even:g}",
            "2 b s d k (n-1)/n numbers of a rank, all ranks",
        ),
    )


def _figure(
    record: TravelRecord, places: tuple[Place, ...], moves: tuple[Move, ...] = ()
) -> DiagramFigure:
    kinds = tuple(f"expert {number}, and its tokens" for number in range(len(record.ranks)))
    return DiagramFigure(kinds=kinds, places=places, moves=moves)


def _place(record: TravelRecord, rank: int, tiles: tuple[Tile, ...]) -> Place:
    tokens = record.ranks[rank]["tokens"]
    return Place(
        label=f"rank {rank}",
        note=f"home of tokens {', '.join(map(str, tokens))}",
        tiles=(_expert(rank), *tiles),
    )


def _expert(number: int, column: int = 0) -> Tile:
    return Tile(
        id=f"expert {number}",
        label=f"E{number}",
        words=f"expert {number}",
        kind=number,
        column=column,
        columns=1,
    )


def _tokens(record: TravelRecord, *, at_home: bool) -> tuple[Place, ...]:
    """Return the ranks with their tokens: at home, or at experts with an outline at home."""
    places: list[Place] = []
    for rank, noted in enumerate(record.ranks):
        own = [one for one in record.assignments if one[1] == rank]
        tiles = [
            _token(token, expert, row=HOME, column=at, gone=not at_home)
            for at, (token, _, expert) in enumerate(own)
        ]
        if not at_home:
            tiles += [
                _token(token, rank, row=ARRIVED, column=at)
                for at, token in enumerate(noted["arrived"])
            ]
        places.append(_place(record, rank, tuple(tiles)))
    return tuple(places)


def _token(token: int, expert: int, *, row: int, column: int, gone: bool = False) -> Tile:
    where = f"place of token {token}, which is at expert {expert}"
    return Tile(
        id=f"{'home' if gone else 'token'} {token}-{expert}",
        label=f"t{token}",
        words=where if gone else f"token {token} for expert {expert}",
        kind=expert,
        state="gone" if gone else "whole",
        row=row,
        column=column,
    )


def _moves(record: TravelRecord, name: str, *, back: bool) -> tuple[Move, ...]:
    found: list[Move] = []
    for source, target, tokens, _ in record.messages(name):
        for token in tokens:
            expert = source if back else target
            verb = "goes back" if back else "goes"
            found.append(
                Move(
                    f"expert {expert}" if back else f"home {token}-{expert}",
                    f"token {token}-{expert}",
                    f"Token {token} {verb} from rank {source} to rank {target}.",
                )
            )
    return tuple(found)
