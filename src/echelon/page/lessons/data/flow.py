# SPDX-License-Identifier: Apache-2.0
"""A step of data parallelism in six phases, as four ranks recorded it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.core.units import decimal_bytes
from echelon.page.document import Fact
from echelon.page.figures import DataTable
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.data.recorded import (
    NAMES,
    Numbers,
    RecordedRun,
    mean_loss,
    number_text,
    numbers_text,
    recorded_run,
    same_weights,
    sum_words,
)
from echelon.page.lessons.diagram import DiagramFigure, Move, Place, Tile, TileState
from echelon.page.lessons.lesson import Frame, Lesson, Scene

_KINDS = ("samples", "weights", "loss", "gradient")
_SAMPLES, _WEIGHTS, _LOSS, _GRADIENT = range(4)
_ROWS = {"hidden.weight": 1, "output.weight": 2}
_DID = {
    "gradient": "gradient of {}",
    "all_reduce": "sum of {} starts",
    "summed": "sum of {} is there",
}


def ddp_flow() -> Lesson:
    """Return the lesson: load, forward, backward, all-reduce, update, and again."""
    run = recorded_run()
    return Lesson(
        id="ddp-flow",
        topic="Data parallelism",
        title="A step of data parallelism, phase by phase",
        rows=("M2",),
        summary=(
            "Four ranks with the same weights read different samples. They differ in losses and "
            "gradients, until the gradients are averaged and all take the same update."
        ),
        source=(
            "what four ranks recorded in two steps of a loop over a model of six weights, split by "
            "ec.parallelize"
        ),
        scenes=(Scene(frames=_frames(run), table=_table(run)),),
        corrections=corrections("llm-training-13", "llm-training-14", "distributed-53"),
    )


def _frames(run: RecordedRun) -> tuple[Frame, ...]:
    return (*_before_the_sum(run), *_from_the_sum_on(run))


def _before_the_sum(run: RecordedRun) -> tuple[Frame, ...]:
    first, n = run.steps[0], run.num_ranks
    each = len(first[0].samples)
    samples = Fact(
        name="samples of a step",
        value=str(n * each),
        note=f"{n} ranks x {each} samples, each sample on one rank",
    )
    loss = Fact(
        name="mean of the losses",
        value=number_text(mean_loss(run, 0)),
        note=f"all {n * each} samples on one device: {number_text(run.alone_loss)}",
    )
    early = Fact(
        name="a sum starts before backward ends",
        value="yes" if all(one.sends_early for one in first) else "no",
        note="it travels while the other gradients are computed",
    )
    return (
        Frame(
            caption="Step 1, load: every rank reads samples of its own. The weights are the same "
            "everywhere: when training began, those of rank 0 went to all.",
            figures=(_figure(run, has=""),),
            facts=(samples,),
        ),
        Frame(
            caption="Step 2, forward: every rank computes the mean loss of its samples. Nothing is "
            "sent.",
            figures=(_figure(run, has="loss"),),
            facts=(loss,),
        ),
        Frame(
            caption="Step 3, backward: every rank has a gradient of its own samples (hatched: only "
            "a part of what is wanted). The last matrix comes first.",
            figures=(_figure(run, has="loss gradient"),),
            facts=(Fact(name="in this order on rank 0", value=_order(run)), early),
        ),
    )


def _from_the_sum_on(run: RecordedRun) -> tuple[Frame, ...]:
    first, n, after = run.steps[0], run.num_ranks, len(run.steps) - 1
    sent = Fact(
        name="a rank sends",
        value=decimal_bytes(sum(first[0].sent.values())),
        note="2 (N-1)/N of each bucket around a ring; buckets are padded to a multiple of N",
    )
    equal = Fact(
        name="weights equal on all ranks",
        value="yes" if same_weights(run, 0) else "no",
        note="bit for bit",
    )
    loss = Fact(
        name="mean of the losses",
        value=number_text(mean_loss(run, after)),
        note=f"{number_text(mean_loss(run, 0))} a step before",
    )
    return (
        Frame(
            caption="Step 4, all-reduce: the gradients of all ranks are added up and divided by "
            f"{n}. Every rank gets the same mean.",
            figures=(_summed(run),),
            facts=(sent,),
        ),
        Frame(
            caption="Step 5, update: every rank takes the same step from the same weights, "
            f"w - {number_text(run.learning_rate)} x mean. No weight is sent.",
            figures=(_figure(run, has="mean", weights=first[0].weights),),
            facts=(equal,),
        ),
        Frame(
            caption="Step 6, again: the next samples, with the new weights.",
            figures=(_figure(run, has="loss", step=after, weights=first[0].weights),),
            facts=(loss,),
        ),
    )


def _order(run: RecordedRun) -> str:
    said = [_DID[kind].format(NAMES[name]) for kind, name in run.steps[0][0].order if kind in _DID]
    return ", ".join(said)


def _table(run: RecordedRun) -> DataTable:
    rows = [
        (
            str(rank),
            f"{one.samples[0]} to {one.samples[-1]}",
            number_text(one.loss),
            *(numbers_text(one.gradients[name], name).replace("\n", "; ") for name in NAMES),
        )
        for rank, one in enumerate(run.steps[0])
    ]
    means = (numbers_text(run.mean(0, name), name).replace("\n", "; ") for name in NAMES)
    rows.append(("mean", "all", number_text(mean_loss(run, 0)), *means))
    head = ("rank", "samples", "loss", "gradient of W1", "gradient of W2")
    return DataTable(head=head, rows=tuple(rows), right=(2,))


def _figure(
    run: RecordedRun, *, has: str, step: int = 0, weights: Mapping[str, Numbers] | None = None
) -> DiagramFigure:
    shown, names = has.split(), list(NAMES)
    places: list[Place] = []
    for rank, one in enumerate(run.steps[step]):
        now = run.start[rank] if weights is None else weights
        tiles = [
            _tile(rank, "samples", f"samples {one.samples[0]} to {one.samples[-1]}", _SAMPLES, 0),
            *(_matrix(rank, name, now[name], "weights of", _WEIGHTS) for name in names),
        ]
        if "loss" in shown:
            tiles.append(_tile(rank, "loss", f"loss {number_text(one.loss)}", _LOSS, 3))
        if "gradient" in shown:
            tiles += [
                _matrix(rank, name, one.gradients[name], "own gradient of", _GRADIENT, "part")
                for name in names
            ]
        if "mean" in shown:
            tiles += [
                _matrix(rank, name, run.mean(step, name), "mean gradient of", _GRADIENT)
                for name in names
            ]
        places.append(Place(label=f"rank {rank}", note="", tiles=tuple(tiles)))
    return DiagramFigure(kinds=_KINDS, places=tuple(places))


def _summed(run: RecordedRun) -> DiagramFigure:
    """Return the mean gradients alone, side by side, with who sent to whom."""
    places = [
        Place(
            label=f"rank {rank}",
            note="",
            tiles=tuple(
                replace(
                    _matrix(rank, name, run.mean(0, name), "mean gradient of", _GRADIENT),
                    row=0,
                    column=column,
                )
                for column, name in enumerate(NAMES)
            ),
        )
        for rank in range(run.num_ranks)
    ]
    return DiagramFigure(kinds=_KINDS, places=tuple(places), moves=_sums(run))


def _tile(rank: int, name: str, label: str, kind: int, row: int) -> Tile:
    return Tile(
        id=f"{name} of {rank}",
        label=label,
        words=f"of rank {rank}",
        kind=kind,
        row=row,
        columns=2,
    )


def _matrix(
    rank: int, name: str, numbers: Numbers, what: str, kind: int, state: TileState = "whole"
) -> Tile:
    """Return a matrix in its row: weights on the left, gradients on the right."""
    return Tile(
        id=f"{kind} {name} of {rank}",
        label=numbers_text(numbers, name),
        words=f"{what} {NAMES[name]}, rank {rank}",
        kind=kind,
        state=state,
        row=_ROWS[name],
        column=0 if kind == _WEIGHTS else 1,
    )


def _sums(run: RecordedRun) -> tuple[Move, ...]:
    """Return an arrow for each pair of ranks between which gradients of a matrix travelled."""
    return tuple(
        Move(
            source=f"{_GRADIENT} {name} of {rank}",
            target=f"{_GRADIENT} {name} of {other}",
            words=sum_words(run, name, rank, other),
        )
        for name in NAMES
        for rank, one in enumerate(run.steps[0])
        for other in sorted(set(one.messages[name]))
    )
