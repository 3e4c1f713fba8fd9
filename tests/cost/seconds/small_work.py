"""A model, a machine and a layout in round numbers, for formulas that are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import LayoutNumbers, MachineNumbers, ModelNumbers, TierNumbers

INSIDE = TierNumbers(degree=4.0, bandwidth=1e9, latency_s=1e-5, efficiency=1.0, half_bytes=0.0)
NETWORK = TierNumbers(degree=64.0, bandwidth=1e8, latency_s=1e-4, efficiency=0.5, half_bytes=1000.0)
MACHINE = MachineNumbers(
    peak_flops=1e12,
    attention_flops=1e12,
    memory_bytes=1e9,
    memory_bandwidth=1e14,
    matmul=1.0,
    half_depth=0.0,
    tile=1.0,
    units=1.0,
    memory=1.0,
    attention=0.5,
    attention_backward=0.25,
    optimizer=0.5,
    aligned=1.0,
    node=4.0,
    tiers=(INSIDE, NETWORK),
)
"""Nodes of four devices that lose nothing to the shape of a product, with memory to spare."""

MODEL = ModelNumbers(
    layers=8.0,
    hidden=64.0,
    heads=8.0,
    query_dim=64.0,
    kv_dim=32.0,
    attention_dim=64.0,
    ffn=128.0,
    up=2.0,
    vocab=256.0,
    tied=0.0,
    positions=0.0,
    length=128.0,
    keys_per_query=64.0,
)
MIXTURE = replace(MODEL, experts=8.0, top_k=2.0, expert_ffn=32.0, shared_experts=1.0)
PLAIN = TrainerConstants(host_s=0.0, mixture_s=0.0, step_s=0.0, spread=0.0)


def small_work(
    *, model: ModelNumbers = MODEL, machine: MachineNumbers = MACHINE, **layout: Any
) -> CostInputs:
    """Return what the formulas read of a small model on that machine, split as `layout` says."""
    return CostInputs(model=model, machine=machine, software=PLAIN, layout=LayoutNumbers(**layout))


def with_trainer(work: CostInputs, **constants: Any) -> CostInputs:
    """Return `work` with other constants of its trainer."""
    return replace(work, software=replace(work.software, **constants))
