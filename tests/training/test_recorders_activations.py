"""What passes the boundaries of a rank's blocks is told by token, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.event import NoEvents
from echelon.core.plan import Recompute
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine
from echelon.training.recorders import ActivationRecorder, RecordedActivation
from echelon.training.subject import rank_batches
from tests.models.test_boundaries import block_boundaries
from tests.parallel.layouts import DEEPSEEK, NANO, plan_of
from tests.parallel.one_device import make_rows


def heard(**changes: Any) -> tuple[TrainEngine, dict[tuple[str, bool, bool], RecordedActivation]]:
    """Return what is recorded of one step."""
    engine = TrainEngine(plan_of(**changes), Recorder(0, NoEvents()), torch.device("cpu"))
    recorder = ActivationRecorder(engine)
    recorder.start_step()
    engine.step(rank_batches(engine.plan, make_rows(engine.plan, 0), engine.data_rank, 0), 0)
    found = {(one.name, one.gradient, one.recomputed): one for one in recorder.recorded()}
    recorder.start_step()
    assert not list(recorder.recorded())
    return engine, found


@pytest.mark.parametrize("policy", ["none", "full"])
def test_every_token_passes_every_boundary_once_and_again_where_recomputed(policy: Any) -> None:
    engine, found = heard(model=NANO, recompute=Recompute(policy=policy))
    rows, length = make_rows(engine.plan, 0), engine.plan.mathematics.sequence_length
    tokens = {
        sample * length + position for sample in rows.sample_ids for position in range(length)
    }
    names = [name for layer in range(NANO.layers) for name in block_boundaries(NANO, layer)]
    again = policy == "full"
    kinds = {(name, gradient, False) for name in [*names, "norm"] for gradient in (False, True)}
    assert found.keys() == kinds | ({(name, False, True) for name in names} if again else set())
    for one in found.values():
        assert sorted(one.tokens_n.tolist()) == sorted(tokens)
        assert one.values_nW.shape == (len(tokens), NANO.hidden)
    if again:
        for name in names:
            first, second = (found[name, False, times].values_nW for times in (False, True))
            assert torch.equal(first, second)


def test_scores_and_gates_of_routers_are_told_by_expert() -> None:
    engine, found = heard(model=DEEPSEEK)
    experts = engine.plan.model.experts
    assert experts is not None
    gates = found["layers.1.gates", False, False]
    scores = found["layers.1.scores", False, False]
    assert gates.values_nW.shape == scores.values_nW.shape == (len(gates.tokens_n), 8)
    assert bool(((gates.values_nW > 0).sum(-1) == experts.top_k).all())
