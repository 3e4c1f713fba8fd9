"""32 samples on four ranks: dealt once, averaged once, and the same weights everywhere."""

from __future__ import annotations

import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.data_parallel import batch_on_ranks
from echelon.page.lessons.recorded_steps import recorded_run
from tests.page.lessons.shown import diagrams, facts, tiles

NAME = "output.weight"


@pytest.mark.system("S58")
def test_samples_move_from_the_batch_to_the_ranks_that_read_them() -> None:
    run, frames = recorded_run(), batch_on_ranks().scene().frames
    assert len(frames) == 6
    (whole,), (dealt,), (again,) = (diagrams(frames[place]) for place in (0, 1, 5))
    assert len(whole.places[0].tiles) == 32
    for step, board in ((0, dealt), (1, again)):
        for rank, place in enumerate(board.places):
            read = tuple(int(one.label) for one in place.tiles if one.id.startswith("sample"))
            assert read == run.steps[step][rank].samples
    ids = {name for name in tiles(frames[0]) if name.startswith("sample")}
    assert ids == {name for name in tiles(frames[1]) if name.startswith("sample")}


def test_gradients_are_own_ones_and_then_the_mean() -> None:
    run, frames = recorded_run(), batch_on_ranks().scene().frames
    own, mean = tiles(frames[2]), tiles(frames[3])
    for rank, one in enumerate(run.steps[0]):
        drawn = [float(x) for x in own[f"gradient of {rank}"].label.split()]
        assert drawn == pytest.approx(one.gradients[NAME], abs=5e-6)
        drawn = [float(x) for x in mean[f"gradient of {rank}"].label.split()]
        assert drawn == pytest.approx(run.mean(0, NAME), abs=5e-6)
        assert own[f"gradient of {rank}"].state == "part"
        assert mean[f"gradient of {rank}"].state == "whole"
    assert facts(frames[3])["equal to the whole batch on one device"] == "yes"
    assert facts(frames[4])["weights equal on all ranks"] == "yes"


def test_memory_and_bytes_of_7b_are_those_of_the_planner() -> None:
    (claim,) = (one for one in all_claims() if one.id == "llm-training-12")
    frames = batch_on_ranks().scene().frames
    assert facts(frames[0])["7B takes on every rank"] == f"{claim.holds}.00 GB"
    assert frames[0].facts[0].note.endswith("14.00 GB + 14.00 GB + 84.00 GB: nothing is shared out")
    assert facts(frames[3])["7B would send"] == "21.00 GB"
