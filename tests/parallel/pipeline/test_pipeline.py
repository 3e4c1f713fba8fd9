"""The pipeline runs the schedule: the same actions in the same order, no more held than proven."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from echelon.schedule.messages import ScheduleMessages
from tests.parallel import targets
from tests.parallel.layouts import GPT2, plan_of
from tests.parallel.pipeline.pipelines import EVERY, pipeline_plan
from tests.parallel.targets import Trained
from tests.walks.matrix.pipeline_cases import num_microbatches


def train(rank_pool: RankPool, plan: Plan, steps: int = 1) -> list[Trained]:
    """Take steps on the ranks of a plan."""
    return rank_pool.run(targets.train, (plan, steps), world_size=plan.mesh.world_size)


@pytest.mark.quick(
    "4-2p-file", "4-2p-zb-v", "4-2p-dualpipe", "2-3p+1-1f1b", "2-3p+1-interleaved-1f1b"
)
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, "3p+1"), (4, "2p")])
def test_executed_order_is_that_of_the_schedule(
    rank_pool: RankPool, schedule: str, pp: int, microbatches: str
) -> None:
    plan = pipeline_plan(schedule, pp, microbatches)
    planned = schedule_from_plan(plan)
    traffic = ScheduleMessages.from_schedule(planned)
    for place, rank in enumerate(train(rank_pool, plan, steps=2)):
        for step in rank.events:
            done = [event.name for event in step if event.kind in ("F", "B", "W", "BW")]
            assert done == [str(action) for action in planned.actions[place]]
            sent = [event.name for event in step if event.kind == "send"]
            posted = [str(one.send) for one in traffic.steps[place] if one.send is not None]
            assert Counter(sent) == Counter(posted)
        assert rank.in_flight <= check_schedule(planned).peak_in_flight_per_rank[place]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_receives_are_posted_two_actions_ahead(rank_pool: RankPool, schedule: str) -> None:
    for rank in train(rank_pool, plan_of(pp=2, schedule=schedule, microbatches=4)):
        order = [(what, name) for what, name in rank.order if what in ("post", "run")]
        posted = {name: index for index, (what, name) in enumerate(order) if what == "post"}
        assert len(posted) == 4
        for index, (what, name) in enumerate(order):
            if what == "run" and name in posted:
                actions_before = sum(kind == "run" for kind, _ in order[:index])
                between = sum(kind == "run" for kind, _ in order[posted[name] : index])
                assert between == min(2, actions_before)


def test_three_boundaries_carry_one_message_each_way(rank_pool: RankPool) -> None:
    plan = plan_of(pp=4, microbatches=4)
    sent = Counter(
        event.name.split()[0]
        for rank in train(rank_pool, plan)
        for event in rank.events[0]
        if event.kind == "send"
    )
    assert sent == {"activation": 3 * 4, "gradient": 3 * 4}


def test_events_know_their_stage_and_microbatch(rank_pool: RankPool) -> None:
    plan = plan_of(pp=2, tp=2, microbatches=3)
    for index, rank in enumerate(train(rank_pool, plan)):
        stage = plan.mesh.coordinates(index)[Axis.PP]
        inside = [e for e in rank.events[0] if e.axis == "tp"]
        assert {event.stage for event in inside} == {stage}
        assert {event.microbatch for event in inside} == {0, 1, 2}
        sends = [e for e in rank.events[0] if e.kind == "send"]
        assert [event.microbatch for event in sends] == [0, 1, 2]


def test_both_ends_of_a_tied_model_hold_the_same_embedding(rank_pool: RankPool) -> None:
    plan = plan_of(pp=2, dp=2, model=GPT2)
    ranks = train(rank_pool, plan, steps=3)
    copies = [rank.parameters["embedding.weight"][0] for rank in ranks]
    assert [shard.primary for shard in copies] == [True, False, False, False]
    for shard in copies[1:]:
        assert torch.equal(shard.tensor, copies[0].tensor)


@pytest.mark.system("B01", "B02", "B03", "S18", "S19")
@pytest.mark.one_in(5)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_computes_the_same_numbers(rank_pool: RankPool, pp: int) -> None:
    first, *others = (
        train(rank_pool, pipeline_plan(schedule, pp), steps=2)
        for schedule in EVERY
        if num_microbatches(schedule, pp, "2p") == 2 * pp
    )
    assert len(others) >= 9
    values = _values(first)
    for other in others:
        for rank in other:
            assert rank.losses == pytest.approx(first[0].losses, rel=1e-13)
        for name, value in _values(other).items():
            torch.testing.assert_close(value, values[name], rtol=1e-12, atol=1e-14)


def _values(ranks: list[Trained]) -> dict[str, torch.Tensor]:
    return {name: held[0].tensor for rank in ranks for name, held in rank.parameters.items()}


def test_a_rank_without_any_block_takes_its_part(rank_pool: RankPool) -> None:
    plan = pipeline_plan("1f1b", 4, stages=((0, 1, 2, 3), (), (), (4, 5, 6, 7)))
    even = train(rank_pool, pipeline_plan("1f1b", 4))
    ranks = train(rank_pool, plan)
    assert [len(rank.parameters) > 0 for rank in ranks] == [True, False, False, True]
    assert [rank.losses for rank in ranks] == [even[0].losses] * 4
