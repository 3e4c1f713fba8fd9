"""Trainers by generation: what is fitted of them, and how they change on processors."""

from __future__ import annotations

from dataclasses import replace

from echelon.cost.bytes.nccl import nccl_facts
from echelon.cost.seconds.trainers import (
    FRAMEWORKS,
    OVERLAPS,
    UNFITTED_FRAMEWORKS,
    constants_on_devices,
    our_constants,
)
from tests.parallel.layouts import LAPTOP

GPUS = replace(LAPTOP, backend="nccl")


def test_what_runs_tell_changes_no_dtype() -> None:
    assert FRAMEWORKS.keys() == UNFITTED_FRAMEWORKS.keys()
    for key, facts in UNFITTED_FRAMEWORKS.items():
        fitted = FRAMEWORKS[key]
        assert (fitted.gradient_bytes, fitted.reduced_bytes) == (
            facts.gradient_bytes,
            facts.reduced_bytes,
        ), key


def test_on_processors_nothing_hides_and_no_context_is_taken() -> None:
    there, here = our_constants(GPUS), our_constants(LAPTOP)
    assert there == replace(FRAMEWORKS["echelon"], gpu_kernels=1.0, **nccl_facts(GPUS))
    assert there.context_bytes > 0.0
    assert [getattr(here, name) for name in OVERLAPS] == [0.0] * 4
    assert (here.context_bytes, here.host_adds, here.by_pairs) == (0.0, 1.0, 1.0)
    assert here.gpu_kernels == 0.0
    assert (here.fused_share, here.reduce_share, here.gather_share) == (1.0, 1.0, 1.0)


def test_what_was_measured_counts_for_our_trainer_alone() -> None:
    measured = replace(GPUS, trainer=(("width_bytes", 77.0),))
    assert our_constants(measured).width_bytes == 77.0
    other = constants_on_devices(FRAMEWORKS["fsdp"], measured, trainer="fsdp")
    assert other == FRAMEWORKS["fsdp"]
