"""Each row that a rank routes is told once, with what the routers know for the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.experts import Balance
from echelon.core.plan import Recompute
from echelon.parallel.transport.recorder import Recorder
from echelon.training.diagnosis import find_routers
from echelon.training.engine import TrainEngine
from echelon.training.recorders import RoutingRecorder
from echelon.training.subject import rank_batches
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, NANO, plan_of
from tests.parallel.one_device import make_rows


def make(**changes: Any) -> tuple[TrainEngine, RoutingRecorder]:
    engine = TrainEngine(plan_of(**changes), Recorder(0, NoEvents()), torch.device("cpu"))
    return engine, RoutingRecorder(engine)


def step(engine: TrainEngine, recorder: RoutingRecorder, number: int) -> Any:
    recorder.start_step()
    batches = rank_batches(engine.plan, make_rows(engine.plan, number), engine.data_rank, number)
    return recorder.step_routing(engine.step(batches, number))


@pytest.mark.parametrize("policy", ["none", "full"])
def test_every_token_of_a_step_is_told_once_for_each_layer(policy: Any) -> None:
    """Also where blocks run forward twice."""
    balance = Balance(kind="aux", capacity_factor=1.0)
    engine, recorder = make(model=MIXTRAL, balance=balance, recompute=Recompute(policy=policy))
    assert len(find_routers(engine.model.stages.values())) == 1
    for number in range(2):
        said = step(engine, recorder, number)
        plan, rows = engine.plan, make_rows(engine.plan, number)
        length = plan.mathematics.sequence_length
        assert [(one.layer, one.microbatch) for one in said.routes] == [
            (layer, microbatch) for layer in (0, 1) for microbatch in (0, 1)
        ]
        for route in said.routes:
            sample = rows.sample_ids[route.microbatch]
            assert sorted(route.tokens) == list(range(sample * length, (sample + 1) * length))
            assert all(len(set(row)) == 2 for row in route.chosen)
        for layer, load in said.loads.items():
            own = [one for one in said.routes if one.layer == layer]
            chosen = [expert for one in own for row in one.chosen for expert in row]
            assert load.counts == tuple(chosen.count(expert) for expert in range(8))
            kept = [keeps for one in own for row in one.kept for keeps in row]
            assert load.dropped == kept.count(False) > 0
            assert said.shares[layer] == pytest.approx([n / len(chosen) for n in load.counts])


def test_biases_are_those_of_the_next_step_and_without_a_capacity_all_is_kept() -> None:
    engine, recorder = make(model=DEEPSEEK, balance=Balance(kind="bias", bias_rate=0.5))
    said = step(engine, recorder, 0)
    (layer,) = said.biases  # the first block is dense
    assert layer == 1
    mean = sum(said.loads[1].counts) / 8
    signs = [(mean > count) - (mean < count) for count in said.loads[1].counts]
    assert said.biases[1] == tuple(0.5 * sign for sign in signs)
    assert all(all(row) for route in said.routes for row in route.kept)


def test_a_dense_model_routes_nothing() -> None:
    assert step(*make(model=NANO), 0) is None
