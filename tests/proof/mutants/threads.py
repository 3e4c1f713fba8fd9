"""Bugs in replicas on threads: what they are given, and how their gradients are summed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.choices.threads import Threads
from echelon.core.plan import Plan
from echelon.parallel.threads.replicas import Replicas
from tests.proof.layouts import Changes, layout
from tests.proof.mutants.planting import Told, mutant

FAST: Changes = {"optimizer": {"learning_rate": 0.05, "warmup_steps": 0}}


def threaded(*, replicas: int = 2, each: int = 1, **chosen: Any) -> Plan:
    """Return a plan on threads, whose microbatches have `each` sequences for a replica."""
    plan = layout(**chosen)
    size = replicas * each
    numbers = replace(plan.mathematics, global_sequences=size * plan.num_microbatches)
    split = replace(plan.layout, microbatch_sequences=size, threads=Threads(replicas=replicas))
    return replace(plan, mathematics=numbers, layout=split)


@mutant(Told("prove-gradients", "head.weight", "1/threads", "threads", plan={}, of=threaded))
def average_of_replicas(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Average over replicas: the loss has been divided by all tokens already."""
    add = Replicas.sum_gradients

    def averaged(self: Replicas, dtype: torch.dtype) -> None:
        add(self, dtype)
        for bucket in self.primary.buckets:
            bucket.gradients.div_(len(self))

    patch.setattr(Replicas, "sum_gradients", averaged)


@mutant(
    Told("prove-gradients", "head.weight", "replicas weighted", "threads", of=threaded),
    Told(
        "prove-gradients",
        "head.weight",
        "replicas weighted",
        "threads",
        plan={"replicas": 4},
        of=threaded,
    ),
)
def unfair_average_onto_the_primary(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Average pair by pair, so that the replica that comes last weighs most."""

    def averaged(self: Replicas, dtype: torch.dtype) -> None:
        for place, bucket in enumerate(self.primary.buckets):
            for number, replica in enumerate(self.others):
                bucket.gradients.add_(replica.buckets[place].gradients)
                if number == len(self.others) - 1:
                    bucket.gradients.sub_(replica.buckets[place].gradients, alpha=0.5)

    patch.setattr(Replicas, "sum_gradients", averaged)


@mutant(Told("prove-gradients", "head.weight", "missing sum", "threads", of=threaded))
def gradients_of_the_last_replica_are_left_out(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Sum all gradients but those of the last replica."""

    def others(self: Replicas) -> Any:
        return self._all[1:-1]

    add = Replicas.sum_gradients

    def fewer(self: Replicas, dtype: torch.dtype) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Replicas, "others", property(others))
            add(self, dtype)

    patch.setattr(Replicas, "sum_gradients", fewer)


@mutant(
    Told(
        "prove-activations",
        "embedding.weight",
        "stale",
        "threads",
        step=1,
        plan=FAST,
        of=threaded,
    ),
    Told(
        "prove-activations",
        "embedding.weight",
        "stale",
        "threads",
        step=1,
        plan={**FAST, "replicas": 4, "each": 2},
        of=threaded,
    ),
)
def replica_not_refreshed_after_the_step(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give the last replica its parameters once, before the first step, and never again."""
    replicate = Replicas.replicate
    given: set[int] = set()

    def once(self: Replicas) -> None:
        last = self.others[-1]
        kept = [bucket.values.clone() for bucket in last.buckets]
        replicate(self)
        if id(self) in given:
            with torch.no_grad():
                for bucket, values in zip(last.buckets, kept, strict=True):
                    bucket.values.copy_(values)
        given.add(id(self))

    patch.setattr(Replicas, "replicate", once)
