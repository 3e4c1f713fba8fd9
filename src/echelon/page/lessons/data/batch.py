# SPDX-License-Identifier: Apache-2.0
"""32 samples on four ranks: own gradients, their mean, and one update, as recorded."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import communication_volume, model_states
from echelon.page.document import Fact
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.data.recorded import (
    NAMES,
    Numbers,
    RecordedRun,
    as_on_one_device,
    number_text,
    numbers_text,
    recorded_run,
    same_weights,
    sum_words,
)
from echelon.page.lessons.diagram import DiagramFigure, Move, Place, Tile, TileState
from echelon.page.lessons.lesson import Frame, Lesson, Scene

WEIGHTS = 7e9  # weights of the model whose memory is told
_NAME = "output.weight"
_COLUMNS = 4  # samples in a row of a rank
_MEAN = "all-reduce"


def batch_on_ranks() -> Lesson:
    """Return the lesson: samples are dealt, gradients averaged, weights stay alike."""
    run = recorded_run()
    return Lesson(
        id="data-parallel",
        topic="Data parallelism",
        title="32 samples, four ranks, one update",
        rows=("M12",),
        summary=(
            "The batch is cut into four, the model is not. The mean of the four gradients is the "
            "gradient of the whole batch, so four ranks take the step that one would take."
        ),
        source=(
            "what four ranks recorded in two steps of a loop over a model of six weights, split by "
            "ec.parallelize; memory and bytes of 7 billion weights by the formulas of the planner"
        ),
        scenes=(Scene(frames=_frames(run)),),
        corrections=corrections(
            "llm-training-11", "llm-training-12", "llm-training-13", "llm-training-15"
        ),
    )


def _frames(run: RecordedRun) -> tuple[Frame, ...]:
    first, n = run.steps[0], run.num_ranks
    start, after = run.start[0], first[0].weights
    whole = sum(len(one.samples) for one in first)
    return (
        Frame(
            caption=f"A batch of {whole} samples, and {n} ranks with the same weights (W2 of the "
            "model is shown).",
            figures=(_figure(run, dealt=False, weights=start, shown="", title="the batch"),),
            facts=_memory(n),
        ),
        Frame(
            caption=f"The batch is cut: {len(first[0].samples)} samples to each rank, no sample "
            "twice.",
            figures=(_figure(run, dealt=True, weights=start, shown=""),),
            facts=_memory(n),
        ),
        Frame(
            caption="Each rank goes forward and backward over its own samples, and has its own "
            "gradient: four different ones.",
            figures=(_figure(run, dealt=True, weights=start, shown="own"),),
            facts=(Fact(name="gradients of W2", value=_own(run), note="a rank each, as recorded"),),
        ),
        Frame(
            caption="An all-reduce adds up the four gradients and divides by four: the mean is on "
            "every rank.",
            figures=(_figure(run, dealt=True, weights=start, shown=_MEAN),),
            facts=(
                Fact(
                    name="equal to the whole batch on one device",
                    value="yes" if as_on_one_device(run) else "no",
                    note=f"W2: {_one_line(run.alone[_NAME])} there",
                ),
                Fact(
                    name="7B would send",
                    value=decimal_bytes(communication_volume(0).sent_bytes(WEIGHTS, n, 2)),
                    note="a rank in a step: 2 (N-1)/N x 14 GB",
                ),
            ),
        ),
        Frame(
            caption="Every rank updates its own copy by the same mean: "
            f"w - {number_text(run.learning_rate)} x mean. Weights are not sent, and stay equal.",
            figures=(_figure(run, dealt=True, weights=after, shown=""),),
            facts=(
                Fact(
                    name="weights equal on all ranks",
                    value="yes" if same_weights(run, 0) else "no",
                    note=f"W2: {_one_line(after[_NAME])}",
                ),
            ),
        ),
        Frame(
            caption="The next batch is dealt, and the step begins again.",
            figures=(_figure(run, dealt=True, weights=after, shown="", step=1),),
            facts=_memory(n),
        ),
    )


def _memory(degree: int) -> tuple[Fact, ...]:
    states = model_states(WEIGHTS, 0, degree)
    held = (states.parameters, states.gradients, states.optimizer)
    parts = " + ".join(map(decimal_bytes, held))
    return (
        Fact(
            name="7B takes on every rank",
            value=decimal_bytes(sum(held)),
            note=f"weights + gradients + optimizer, {parts}: nothing is shared out",
        ),
    )


def _own(run: RecordedRun) -> str:
    return "; ".join(_one_line(one.gradients[_NAME]) for one in run.steps[0])


def _one_line(numbers: Numbers) -> str:
    return " ".join(map(number_text, numbers))


def _figure(
    run: RecordedRun,
    *,
    dealt: bool,
    weights: Mapping[str, Numbers],
    shown: str,
    step: int = 0,
    title: str = "",
) -> DiagramFigure:
    ranks = run.steps[step]
    n = len(ranks)
    kinds = (*(f"samples of rank {rank}" for rank in range(n)), "weights", "gradient")
    places: list[Place] = []
    if not dealt:
        tiles = [
            _sample(sample, rank, rank * len(one.samples) + at, 2 * _COLUMNS)
            for rank, one in enumerate(ranks)
            for at, sample in enumerate(one.samples)
        ]
        places.append(Place(label=title, note=f"{len(tiles)} samples", tiles=tuple(tiles)))
    for rank, one in enumerate(ranks):
        tiles = [_matrix(rank, weights[_NAME], "weights", n, 1)]
        if dealt:
            tiles += [
                _sample(sample, rank, at + 2 * _COLUMNS, _COLUMNS)
                for at, sample in enumerate(one.samples)
            ]
        if shown == "own":
            tiles.append(_matrix(rank, one.gradients[_NAME], "own gradient", n + 1, 0, "part"))
        if shown == _MEAN:
            tiles.append(_matrix(rank, run.mean(step, _NAME), "mean gradient", n + 1, 0))
        places.append(Place(label=f"rank {rank}", note="", tiles=tuple(tiles)))
    moves = _sums(run) if shown == _MEAN else ()
    return DiagramFigure(kinds=kinds, places=tuple(places), moves=moves)


def _sample(sample: int, rank: int, at: int, columns: int) -> Tile:
    return Tile(
        id=f"sample {sample}",
        label=str(sample),
        words=f"sample {sample}, for rank {rank}",
        kind=rank,
        row=at // columns,
        column=at % columns,
    )


def _matrix(
    rank: int, numbers: Numbers, what: str, kind: int, row: int, state: TileState = "whole"
) -> Tile:
    return Tile(
        id=f"{what.rsplit(maxsplit=1)[-1]} of {rank}",
        label=numbers_text(numbers, _NAME),
        words=f"{what} of {NAMES[_NAME]}, rank {rank}",
        kind=kind,
        state=state,
        row=row,
        columns=_COLUMNS,
    )


def _sums(run: RecordedRun) -> tuple[Move, ...]:
    return tuple(
        Move(
            source=f"gradient of {rank}",
            target=f"gradient of {other}",
            words=sum_words(run, _NAME, rank, other),
        )
        for rank, one in enumerate(run.steps[0])
        for other in sorted(set(one.messages[_NAME]))
    )
