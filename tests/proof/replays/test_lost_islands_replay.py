"""A replay of recorded meetings, by hand where that can be, and beside the oracle of no losses."""

from __future__ import annotations

import torch

from echelon.proof.oracle.local_sgd import run_islands
from echelon.proof.replays.lost_islands import MeetingMistake, MeetingReplay, MetIslands
from echelon.proof.replays.records import MOMENTUM, PARAMETERS, VALUES
from echelon.proof.shrink import shrink
from tests.proof.replays.planted import elastic


def test_without_a_loss_it_is_the_oracle_of_islands() -> None:
    plan = shrink(elastic(), precision="fp64", names_apart=True)
    met = [MetIslands(step=step, members=(0, 1), joins=()) for step in (2, 4)]
    held = MeetingReplay(plan, met).run().held
    oracle = run_islands(plan, 4)
    for step in (2, 4):
        right = oracle.outer[step - 1]
        for island in (0, 1):
            for kind, values in ((PARAMETERS, right.after), (MOMENTUM, right.momentum_after)):
                for name, value in values.items():
                    torch.testing.assert_close(held[step, island, kind][name], value)


def test_the_mean_is_over_those_that_met_and_who_comes_back_has_what_they_have() -> None:
    plan = shrink(elastic(), precision="fp64", names_apart=True)
    met = [
        MetIslands(step=2, members=(0,), joins=(1,)),
        MetIslands(step=4, members=(0, 1), joins=()),
    ]
    right = MeetingReplay(plan, met).run().held
    name = next(iter(right[2, 0, VALUES]))
    for kind in (VALUES, PARAMETERS, MOMENTUM):
        assert torch.equal(right[2, 0, kind][name], right[2, 1, kind][name])
    assert (2, 1, VALUES) in right

    half = MeetingReplay(plan, met[:1], MeetingMistake(divides_by_all=True)).run().held
    # The momentum of a first round is the mean itself.
    torch.testing.assert_close(2 * half[2, 0, MOMENTUM][name], right[2, 0, MOMENTUM][name])
    forgetful = MeetingReplay(plan, met, MeetingMistake(no_momentum=True)).run().held
    assert not forgetful[2, 1, MOMENTUM][name].any()
    assert not torch.equal(forgetful[4, 1, PARAMETERS][name], right[4, 1, PARAMETERS][name])
    assert torch.equal(forgetful[4, 0, PARAMETERS][name], forgetful[4, 0, VALUES][name])
