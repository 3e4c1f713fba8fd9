"""Small plans of every ZeRO stage for the tests of formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from echelon.core.plan import (
    OffloadTarget,
    Optimizer,
    OptimizerKind,
    Plan,
    Precision,
    Zero,
    ZeroStage,
)
from tests.parallel.layouts import GPT2, NANO, QWEN, plan_of

MIXED = Precision(parameters="bf16", gradients="bf16", reduction="fp32", master="fp32")
WIDE = Precision(parameters="bf16", gradients="fp32", reduction="bf16", master="fp32")
SINGLE = Precision()
DOUBLE = Precision(parameters="fp64", gradients="fp64", reduction="fp64", master="fp64")

HOMES: tuple[OffloadTarget, ...] = ("none", "host", "nvme")
KINDS: tuple[OptimizerKind, ...] = ("adamw", "sgd", "muon")


def zero_plan(
    stage: ZeroStage,
    *,
    zero: Zero | None = None,
    precision: Precision = DOUBLE,
    cp: int = 1,
    optimizer: OptimizerKind = "adamw",
    **changes: Any,
) -> Plan:
    """Return a small plan at a ZeRO stage: slices add up from stage 2 on, unless `zero` says."""
    plan = plan_of(optimizer=Optimizer(kind=optimizer), **changes)
    default = Zero(
        stage=stage,
        bucket_bytes=plan.layout.zero.bucket_bytes,
        accumulate="slices" if stage >= 2 else "whole",
    )
    layout = replace(plan.layout, zero=zero or default, mesh=replace(plan.mesh, cp=cp))
    mathematics = replace(plan.mathematics, precision=precision)
    return replace(plan, layout=layout, mathematics=mathematics)


@st.composite
def zero_plans(draw: st.DrawFn, *, optimizers: tuple[OptimizerKind, ...] = KINDS) -> Plan:
    """Draw a plan of any stage, mesh, optimizer and offload."""
    stage: ZeroStage = draw(st.sampled_from((0, 1, 2, 3)))
    zero = Zero(
        stage=stage,
        bucket_bytes=draw(st.sampled_from((8, 1000, 4096, 2**20))),
        accumulate=draw(st.sampled_from(("whole", "slices"))) if stage else "whole",
        reshard_after_forward=draw(st.booleans()),
        prefetch=draw(st.integers(0, 2)),
        unit_blocks=draw(st.integers(1, 2)),
        keep_whole_below=draw(st.sampled_from((0, 17, 300))),
        optimizer_offload=draw(st.sampled_from(HOMES)) if stage else "none",
        parameter_offload=draw(st.sampled_from(HOMES)) if stage == 3 else "none",
    )
    tp = draw(st.sampled_from((1, 2)))
    return zero_plan(
        stage,
        zero=zero,
        precision=draw(st.sampled_from((MIXED, WIDE, SINGLE, DOUBLE))),
        optimizer=draw(st.sampled_from(optimizers)),
        model=draw(st.sampled_from((NANO, QWEN, GPT2))),
        pp=draw(st.sampled_from((1, 2))),
        dp=draw(st.integers(1, 2)),
        dp_shard=draw(st.integers(1, 3)),
        cp=draw(st.sampled_from((1, 2))),
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        microbatches=draw(st.integers(1, 3)),
    )
