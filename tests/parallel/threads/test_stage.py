"""Replicas on threads: the seven steps, step by step, beside one process and beside ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from echelon.core.choices.threads import THREADS_AXIS, Threads
from echelon.core.event import EventList
from echelon.core.plan import Plan, Precision, Recompute
from echelon.cost.bytes.sent import bytes_sent
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.parallel.threads.stage import part_of_batch
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.matrix.bytes_walk import compare_plan
from echelon.proof.run import prove
from echelon.training.engine import TrainEngine
from echelon.training.subject import held_bytes, rank_batches
from tests.parallel.layouts import GPT2, NANO, plan_of
from tests.parallel.one_device import make_rows

CPU = torch.device("cpu")


def threaded(replicas: int, *, each: int = 1, microbatches: int = 3, **chosen: object) -> Plan:
    """Return a plan on threads, whose microbatches have `each` sequences for a replica."""
    plan = plan_of(**chosen)  # pyright: ignore[reportArgumentType]
    size = each * replicas
    numbers = replace(plan.mathematics, global_sequences=size * microbatches)
    layout = replace(plan.layout, microbatch_sequences=size, threads=Threads(replicas=replicas))
    return replace(plan, mathematics=numbers, layout=layout)


MIXED = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")
PLANS: dict[str, Plan] = {
    "2": threaded(2),
    "4": threaded(4, each=2, microbatches=2),
    "3, tied, dropout": threaded(3, model=replace(GPT2, dropout=0.1)),
    "2, recompute": threaded(2, recompute=Recompute(policy="full")),
    "2, documents": threaded(2, each=2, documents="separate"),
}


@pytest.mark.one_in(3)
@pytest.mark.system("S05")
@pytest.mark.parametrize("name", PLANS)
def test_replicas_on_threads_equal_the_full_batch(name: str, rank_pool: RankPool) -> None:
    """S05: two, three and four replicas equal one process in float64, tensor by tensor."""
    proof = prove(PLANS[name], run_ranks=rank_pool.run, own_precision=False)
    assert proof.proven, proof.diagnosis


@pytest.mark.system("S05")
def test_bytes_through_the_primary_are_those_of_the_formulas() -> None:
    """S05: what events say of a step is what the plan says, term by term; replicated once."""
    for replicas in (2, 4):
        plan = threaded(replicas, each=2)
        engine, events = engine_of(plan)
        for step in range(3):
            events.events.clear()
            take_step(engine, step)
            found: Counter[str] = Counter()
            for event in events.events:
                if event.axis == THREADS_AXIS:
                    names = {"reduce": "gradients", "seeds": "seeds"}
                    kind = event.name if event.name in names else event.kind
                    found[names.get(kind, kind)] += event.bytes
            terms = [one for one in bytes_sent(plan, 0) if one.axis == THREADS_AXIS]
            assert found == {term.name: term.bytes for term in terms}
            times = Counter(event.kind for event in events.events)
            assert times["replicate"] == 1
            assert times["gather"] == plan.num_microbatches
            assert times["scatter"] == 2 * plan.num_microbatches
        elements = sum(bucket.plan.num_elements for bucket in engine.model.buckets)
        sent = {term.name: term.bytes for term in terms}
        assert sent["replicate"] == sent["gradients"] == (replicas - 1) * elements * 8
        engine.close()


def test_bytes_sent_and_held_are_those_of_the_plan(rank_pool: RankPool) -> None:
    mixed = threaded(2)
    mixed = replace(mixed, mathematics=replace(mixed.mathematics, precision=MIXED))
    for plan in (threaded(2), threaded(4), mixed):
        compare_plan(plan, rank_pool.run)
    engine, _ = engine_of(threaded(4))
    held = held_bytes(engine)
    assert held["parameters of replicas"] == 3 * held["parameters"]
    assert held["gradients of replicas"] == 3 * held["gradients"]
    engine.close()


@pytest.mark.system("S05")
def test_gradients_are_sums_onto_the_primary() -> None:
    """S05: golden 004-09: each replica's gradient is of its own tokens, and they are added."""
    plan = threaded(2, microbatches=1)
    engine, _ = engine_of(plan)
    parts: list[list[torch.Tensor]] = []
    replicas = engine.model.replicas
    assert replicas is not None
    add = replicas.sum_gradients

    def keep(dtype: torch.dtype) -> None:
        every = (replicas.primary, *replicas.others)
        parts.extend([bucket.gradients.clone() for bucket in one.buckets] for one in every)
        add(dtype)

    engine.model.reduction.then = partial(keep, torch.float64)
    summed: list[torch.Tensor] = []
    engine.on_gradients = lambda: summed.extend(
        bucket.gradients.clone() for bucket in engine.model.buckets
    )
    take_step(engine, 0)
    for first, second, total in zip(*parts, summed, strict=True):
        assert torch.equal(first + second, total)
        assert first.norm() > 0
        assert not torch.equal(first, second)
    engine.close()


def test_validation_runs_on_all_replicas_with_the_parameters_of_now() -> None:
    plan = threaded(2, each=2)
    alone = replace(plan, layout=replace(plan.layout, threads=Threads()))
    losses: list[float] = []
    for one in (plan, alone):
        engine, _ = engine_of(one)
        take_step(engine, 0)
        losses.append(engine.evaluate(rank_batches(one, make_rows(one, 1), 0, 1)))
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_replica_takes_its_sequences_of_a_microbatch() -> None:
    tokens_BT = torch.arange(12).view(4, 3)
    batch = TokenBatch.from_rows(tokens_BT, tokens_BT + 1, torch.arange(4))
    batch = batch.cut((), ((0,), (0, 1), (0, 2), (0, 1, 2)))
    second = part_of_batch(batch, 1, 2)
    assert second.tokens_N.tolist() == [6, 9, 7, 10, 8, 11]
    assert second.labels_N.tolist() == [7, 10, 8, 11, 9, 12]
    assert second.sample_ids_B.tolist() == [2, 3]
    assert second.documents == ((0, 2), (0, 1, 2))


def test_what_a_replica_raises_ends_the_step() -> None:
    engine, _ = engine_of(threaded(2, model=NANO))
    replicas = engine.model.replicas
    assert replicas is not None

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("no forward here")

    replicas.others[0].decoder.forward = broken
    with pytest.raises(ValueError, match="no forward here"):
        take_step(engine, 0)
    engine.close()


def engine_of(plan: Plan) -> tuple[TrainEngine, EventList]:
    events = EventList()
    return TrainEngine(plan, Recorder(0, events), CPU), events


def take_step(engine: TrainEngine, step: int) -> None:
    engine.step(rank_batches(engine.plan, make_rows(engine.plan, step), 0, step), step)
