"""Six phases of a step: what is drawn and said is what four ranks recorded."""

from __future__ import annotations

import pytest

from echelon.page.lessons.data_parallel import ddp_flow
from echelon.page.lessons.recorded_steps import NAMES, mean_loss, number_text, recorded_run
from tests.page.lessons.shown import diagrams, facts, tiles

WEIGHT, GRADIENT = 1, 3


def _floats(label: str) -> list[float]:
    return [float(one) for one in label.split()]


@pytest.mark.system("S58")
def test_phases_show_what_ranks_recorded() -> None:
    run, frames = recorded_run(), ddp_flow().scene().frames
    assert [one.caption.split(",")[0] for one in frames] == [
        f"Step {number}" for number in range(1, 7)
    ]
    load, forward, backward, summed, update, again = map(tiles, frames)
    for rank, one in enumerate(run.steps[0]):
        assert load[f"samples of {rank}"].label == f"samples {8 * rank} to {8 * rank + 7}"
        assert forward[f"loss of {rank}"].label == f"loss {number_text(one.loss)}"
        for name in NAMES:
            own = backward[f"{GRADIENT} {name} of {rank}"]
            assert own.state == "part"
            assert _floats(own.label) == pytest.approx(one.gradients[name], abs=5e-6)
            mean = summed[f"{GRADIENT} {name} of {rank}"]
            assert mean.state == "whole"
            assert _floats(mean.label) == pytest.approx(run.mean(0, name), abs=5e-6)
            after = update[f"{WEIGHT} {name} of {rank}"]
            assert _floats(after.label) == pytest.approx(one.weights[name], abs=5e-6)
        samples = run.steps[1][rank].samples
        assert again[f"samples of {rank}"].label == f"samples {samples[0]} to {samples[-1]}"


def test_facts_are_those_of_the_run() -> None:
    run, frames = recorded_run(), ddp_flow().scene().frames
    told = [facts(one) for one in frames]
    assert told[0]["samples of a step"] == "32"
    assert told[1]["mean of the losses"] == number_text(run.alone_loss)
    assert told[2]["in this order on rank 0"].startswith("gradient of W2, sum of W2 starts")
    assert told[2]["a sum starts before backward ends"] == "yes"
    assert told[3]["a rank sends"] == f"{sum(run.steps[0][0].sent.values())} B"
    assert told[4]["weights equal on all ranks"] == "yes"
    assert told[5]["mean of the losses"] == number_text(mean_loss(run, 1))


def test_arrows_are_between_ranks_that_sent_messages() -> None:
    (board,) = diagrams(ddp_flow().scene().frames[3])
    ring = [(f"of {rank}", f"of {(rank + 1) % 4}") for rank in range(4)]
    drawn = [(one.source.split()[-2:], one.target.split()[-2:]) for one in board.moves]
    assert drawn == [(one.split(), other.split()) for one, other in ring] * 2


def test_the_table_has_every_rank_and_the_mean() -> None:
    table = ddp_flow().scene().table
    assert table is not None
    assert [row[0] for row in table.rows] == ["0", "1", "2", "3", "mean"]
