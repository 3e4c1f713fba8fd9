# SPDX-License-Identifier: Apache-2.0
"""Data parallelism as four ranks recorded it: phases of a step, and 32 samples to one update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.model_sizes import communication_volume, model_states
from echelon.page.lessons.corrections import corrections
from echelon.page.lessons.lesson import (
    DiagramFigure,
    Frame,
    Lesson,
    Move,
    Place,
    Scene,
    Tile,
    TileState,
)
from echelon.page.lessons.recorded_steps import (
    NAMES,
    Numbers,
    RecordedRun,
    as_on_one_device,
    mean_loss,
    number_text,
    numbers_text,
    recorded_run,
    same_weights,
    sum_words,
)
from echelon.planner.view.document import DataTable, Fact

_KINDS = ("samples", "weights", "loss", "gradient")
_SAMPLES, _WEIGHTS, _LOSS, _GRADIENT = range(4)
_ROWS = {"hidden.weight": 1, "output.weight": 2}
_DID = {
    "gradient": "gradient of {}",
    "all_reduce": "sum of {} starts",
    "summed": "sum of {} is there",
}

WEIGHTS = 7e9  # weights of the model whose memory is told
_NAME = "output.weight"
_COLUMNS = 4  # samples in a row of a rank
_MEAN = "all-reduce"


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
        scenes=(Scene(frames=(*_before_the_sum(run), *_from_the_sum_on(run)), table=_table(run)),),
        corrections=corrections("llm-training-13", "llm-training-14", "distributed-53"),
    )


def _before_the_sum(run: RecordedRun) -> tuple[Frame, ...]:
    first, n = run.steps[0], run.num_ranks
    each = len(first[0].samples)
    samples = Fact(
        "samples of a step", str(n * each), f"{n} ranks x {each} samples, each sample on one rank"
    )
    loss = Fact(
        "mean of the losses",
        number_text(mean_loss(run, 0)),
        f"all {n * each} samples on one device: {number_text(run.alone_loss)}",
    )
    early = Fact(
        "a sum starts before backward ends",
        "yes" if all(one.sends_early for one in first) else "no",
        "it travels while the other gradients are computed",
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
            facts=(Fact("in this order on rank 0", _order(run)), early),
        ),
    )


def _from_the_sum_on(run: RecordedRun) -> tuple[Frame, ...]:
    first, n, after = run.steps[0], run.num_ranks, len(run.steps) - 1
    sent = Fact(
        "a rank sends",
        decimal_bytes(sum(first[0].sent.values())),
        "2 (N-1)/N of each bucket around a ring; buckets are padded to a multiple of N",
    )
    equal = Fact(
        "weights equal on all ranks", "yes" if same_weights(run, 0) else "no", "bit for bit"
    )
    loss = Fact(
        "mean of the losses",
        number_text(mean_loss(run, after)),
        f"{number_text(mean_loss(run, 0))} a step before",
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
    return DataTable.of(head, rows)


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
    return Tile(f"{name} of {rank}", label, f"of rank {rank}", kind, row=row, columns=2)


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
            f"{_GRADIENT} {name} of {rank}",
            f"{_GRADIENT} {name} of {other}",
            sum_words(run, name, rank, other),
        )
        for name in NAMES
        for rank, one in enumerate(run.steps[0])
        for other in sorted(set(one.messages[name]))
    )


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
        scenes=(Scene(frames=_batch_frames(run)),),
        corrections=corrections(
            "llm-training-11", "llm-training-12", "llm-training-13", "llm-training-15"
        ),
    )


def _batch_frames(run: RecordedRun) -> tuple[Frame, ...]:
    first, n = run.steps[0], run.num_ranks
    start, after = run.start[0], first[0].weights
    whole = sum(len(one.samples) for one in first)
    return (
        Frame(
            caption=f"A batch of {whole} samples, and {n} ranks with the same weights (W2 of the "
            "model is shown).",
            figures=(_batch_figure(run, dealt=False, weights=start, shown="", title="the batch"),),
            facts=_memory(n),
        ),
        Frame(
            caption=f"The batch is cut: {len(first[0].samples)} samples to each rank, no sample "
            "twice.",
            figures=(_batch_figure(run, dealt=True, weights=start, shown=""),),
            facts=_memory(n),
        ),
        Frame(
            caption="Each rank goes forward and backward over its own samples, and has its own "
            "gradient: four different ones.",
            figures=(_batch_figure(run, dealt=True, weights=start, shown="own"),),
            facts=(Fact("gradients of W2", _own(run), "a rank each, as recorded"),),
        ),
        Frame(
            caption="An all-reduce adds up the four gradients and divides by four: the mean is on "
            "every rank.",
            figures=(_batch_figure(run, dealt=True, weights=start, shown=_MEAN),),
            facts=(
                Fact(
                    "equal to the whole batch on one device",
                    "yes" if as_on_one_device(run) else "no",
                    f"W2: {_one_line(run.alone[_NAME])} there",
                ),
                Fact(
                    "7B would send",
                    decimal_bytes(communication_volume(0).sent_bytes(WEIGHTS, n, 2)),
                    "a rank in a step: 2 (N-1)/N x 14 GB",
                ),
            ),
        ),
        Frame(
            caption="Every rank updates its own copy by the same mean: "
            f"w - {number_text(run.learning_rate)} x mean. Weights are not sent, and stay equal.",
            figures=(_batch_figure(run, dealt=True, weights=after, shown=""),),
            facts=(
                Fact(
                    "weights equal on all ranks",
                    "yes" if same_weights(run, 0) else "no",
                    f"W2: {_one_line(after[_NAME])}",
                ),
            ),
        ),
        Frame(
            caption="The next batch is dealt, and the step begins again.",
            figures=(_batch_figure(run, dealt=True, weights=after, shown="", step=1),),
            facts=_memory(n),
        ),
    )


def _memory(degree: int) -> tuple[Fact, ...]:
    states = model_states(WEIGHTS, 0, degree)
    held = (states.parameters, states.gradients, states.optimizer)
    parts = " + ".join(map(decimal_bytes, held))
    return (
        Fact(
            "7B takes on every rank",
            decimal_bytes(sum(held)),
            f"weights + gradients + optimizer, {parts}: nothing is shared out",
        ),
    )


def _own(run: RecordedRun) -> str:
    return "; ".join(_one_line(one.gradients[_NAME]) for one in run.steps[0])


def _one_line(numbers: Numbers) -> str:
    return " ".join(map(number_text, numbers))


def _batch_figure(
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
        tiles = [_batch_matrix(rank, weights[_NAME], "weights", n, 1)]
        if dealt:
            tiles += [
                _sample(sample, rank, at + 2 * _COLUMNS, _COLUMNS)
                for at, sample in enumerate(one.samples)
            ]
        if shown == "own":
            tiles.append(
                _batch_matrix(rank, one.gradients[_NAME], "own gradient", n + 1, 0, "part")
            )
        if shown == _MEAN:
            tiles.append(_batch_matrix(rank, run.mean(step, _NAME), "mean gradient", n + 1, 0))
        places.append(Place(label=f"rank {rank}", note="", tiles=tuple(tiles)))
    moves = _batch_sums(run) if shown == _MEAN else ()
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


def _batch_matrix(
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


def _batch_sums(run: RecordedRun) -> tuple[Move, ...]:
    return tuple(
        Move(f"gradient of {rank}", f"gradient of {other}", sum_words(run, _NAME, rank, other))
        for rank, one in enumerate(run.steps[0])
        for other in sorted(set(one.messages[_NAME]))
    )
