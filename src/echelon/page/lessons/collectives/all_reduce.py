# SPDX-License-Identifier: Apache-2.0
"""One all-reduce by four algorithms, as four ranks recorded their messages."""

from __future__ import annotations

from echelon.core.plan import DTYPE_BYTES
from echelon.core.units import decimal_bytes
from echelon.cost.bytes.all_reduce import SumGroup
from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.collectives.board import round_board
from echelon.page.lessons.collectives.recorded import RecordedCollective, recorded_collective
from echelon.page.lessons.lesson import Frame, Lesson, LessonControl, Scene

RANKS = 4  # ranks that recorded
BYTES = DTYPE_BYTES["fp32"]
_RECORDED = {
    "ring": "all-reduce",
    "halving-doubling": "halving-doubling",
    "tree": "tree",
    "hierarchical": "hierarchical",
}
"""What the recording of each algorithm is called."""
ALGORITHMS = tuple(_RECORDED)
_CONTROLS = (LessonControl(name="algorithm", label="algorithm", values=ALGORITHMS, start=1),)
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
        controls=_CONTROLS,
        scenes=tuple(_scene(name) for name in ALGORITHMS),
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


def _scene(algorithm: str) -> Scene:
    run = recorded_collective(_RECORDED[algorithm])
    nodes = member(algorithm, 0).nodes if algorithm == "hierarchical" else ()
    frames = tuple(
        Frame(
            caption=_caption(algorithm, run, number),
            figures=(round_board(run, number, state, nodes),),
            facts=_facts(algorithm, run, number),
        )
        for number, state in enumerate(run.states())
    )
    return Scene(frames=frames, table=_table())


def _caption(algorithm: str, run: RecordedCollective, number: int) -> str:
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


def _facts(algorithm: str, run: RecordedCollective, rounds: int) -> tuple[Fact, ...]:
    sent = [0] * RANKS
    for one in run.messages:
        if one.round < rounds:
            sent[one.source] += BYTES * len(one.values)
    told = [member(algorithm, rank).bytes(RANKS, BYTES) for rank in range(RANKS)]
    return (
        Fact(
            name="bytes that ranks have sent",
            value=", ".join(map(str, sent)),
            note=f"{', '.join(map(str, told))} in the end, by the formula",
        ),
        Fact(
            name="messages so far",
            value=f"{sum(one.round < rounds for one in run.messages)} of {len(run.messages)}",
            note=f"in {run.num_rounds} rounds",
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
    return DataTable(head=head, rows=tuple(rows), right=(1, 2, 3, 4))
