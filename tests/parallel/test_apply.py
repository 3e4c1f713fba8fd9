"""A plan applied on one rank: what the rank gets, and that its values are those of the seed."""

from __future__ import annotations

from dataclasses import replace

import torch

from echelon.core.parameters import parameters
from echelon.core.plan import Zero
from echelon.models.counter_random import initial_values
from echelon.parallel.storage.weights import stored_values
from tests.parallel.layouts import MIXTRAL, NANO, plan_of
from tests.parallel.one_rank import alone


def test_one_rank_holds_every_parameter_once_with_its_first_value() -> None:
    plan = plan_of(dtype="fp32")
    model, _ = alone(plan)
    held = {slot.spec.name: slot.parameter for bucket in model.buckets for slot in bucket.slots}
    wanted = {spec.name: spec for spec in parameters(plan.model)}
    assert held.keys() == wanted.keys() == dict(model.stages[0].named_parameters()).keys()
    for name, spec in wanted.items():
        values = initial_values(plan.model, spec, plan.mathematics.seed)
        assert torch.equal(held[name].detach(), values), name


def test_stages_look_into_the_buckets() -> None:
    model, _ = alone(plan_of())
    for name, parameter in model.stages[0].named_parameters():
        storages = {bucket.values.untyped_storage().data_ptr() for bucket in model.buckets}
        assert parameter.untyped_storage().data_ptr() in storages, name
    assert model.store.buckets is model.buckets
    assert model.stages[0].operations.gatherer is model.gathering  # pyright: ignore
    assert model.executor.stages is model.stages


def test_what_a_plan_does_not_ask_for_is_not_there() -> None:
    model, _ = alone(plan_of())
    assert (model.balancer, model.parameter_store) == (None, None)
    experts, _ = alone(plan_of(model=MIXTRAL))
    assert experts.balancer is not None
    assert experts.balancer.layers == (0, 1)


def test_slices_rest_where_the_plan_says() -> None:
    zero = Zero(stage=3, parameter_offload="host")
    model, _ = alone(plan_of(zero=zero, model=replace(NANO, layers=1)))
    store = model.parameter_store
    assert store is not None
    sliced = [bucket for bucket in model.buckets if bucket.plan.sliced]
    assert sliced
    assert not any(bucket.values_memory.present for bucket in sliced)
    kept = sum(bucket.value_slice.nbytes for bucket in sliced)
    assert kept <= store.held_bytes() == store.live_bytes()["host"]
    assert all(stored_values(bucket).any() for bucket in sliced)
