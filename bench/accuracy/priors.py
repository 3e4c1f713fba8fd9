"""What is known of devices and trainers before any run is looked at: where a fit begins.

A constant that no row tells stays here. Devices: largest products of ml-engineering's table, and
what papers on attention kernels report (Dao, 2023; Shah et al., FlashAttention-3, 2024). Trainers:
what their code does, and otherwise the middle of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.core.cluster import Efficiency
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.seconds.trainers import COMPILED, UNFITTED_FRAMEWORKS

DEVICES: Mapping[str, Efficiency] = {
    "A100": Efficiency(
        half_reach=250.0,
        matmul=0.82,
        half_depth=150.0,
        memory=0.82,
        attention=0.6,
        attention_backward=0.5,
    ),
    "H100": Efficiency(
        half_reach=500.0,
        matmul=0.75,
        half_depth=200.0,
        memory=0.82,
        attention=0.5,
        attention_backward=0.4,
    ),
    # As of the H100: 0.88 of the largest product measured, and the same depth and bandwidth.
    "B200": Efficiency(
        half_reach=700.0,
        matmul=0.68,
        half_depth=600.0,
        memory=0.73,
        attention=0.42,
        attention_backward=0.26,
    ),
    "GB200": Efficiency(
        half_reach=700.0,
        matmul=0.64,
        half_depth=600.0,
        memory=0.73,
        attention=0.42,
        attention_backward=0.26,
        launch_s=4e-6,
    ),
    # Softmax is twice as fast.
    "B300": Efficiency(
        half_reach=700.0,
        matmul=0.68,
        half_depth=600.0,
        memory=0.73,
        attention=0.47,
        attention_backward=0.29,
    ),
    "GB300": Efficiency(
        half_reach=700.0,
        matmul=0.68,
        half_depth=600.0,
        memory=0.73,
        attention=0.47,
        attention_backward=0.29,
        launch_s=4e-6,
    ),
    # What a fit starts from of cards: their presets, of peaks with fp32 sums.
    "MI300X": Efficiency(
        half_reach=500.0,
        matmul=0.55,
        half_depth=400.0,
        memory=0.75,
        attention=0.42,
        attention_backward=0.3,
    ),
    "RTX4090": Efficiency(half_reach=250.0, matmul=0.9, half_depth=64.0, memory=0.85),
    "RTX5090": Efficiency(half_reach=250.0, matmul=0.9, half_depth=64.0, memory=0.85),
    "RTXPRO6000": Efficiency(half_reach=250.0, matmul=0.75, half_depth=64.0, memory=0.85),
    "L40S": Efficiency(half_reach=250.0, matmul=0.65, half_depth=64.0, memory=0.85),
    "V100": Efficiency(
        half_reach=200.0,
        matmul=0.8,
        half_depth=64.0,
        memory=0.8,
        attention=0.4,
        attention_backward=0.3,
    ),
}
"""By generation of device; one that is not here has its catalogue's values."""

EAGER = {
    "pace": 1.1,
    "fused_share": 0.8,
    "score_bytes": 16.0,
    "width_bytes": 50.0,
    "inner_bytes": 10.0,
    "host_s": 1.2e-5,
    "hook_s": 5e-4,
    "fp8_bytes": 6.0,
    "mixture_s": 1e-3,
    "logit_bytes": 24.0,
    "reduce_overlap": 0.5,
    "reduce_share": 0.8,
    "gather_overlap": 0.85,
    "gather_share": 0.9,
    "tensor_overlap": 0.1,
    "expert_overlap": 0.2,
    "pipeline_overlap": 0.05,
    "interference": 0.1,
    "step_s": 0.01,
    "spread": 0.01,
}
"""The constants of a trainer of which nothing is known."""
KNOWN: Mapping[str, Mapping[str, float]] = {
    # Nothing is sent behind compute; CPU threads start each kernel of a block.
    "megatron": {"pace": 1.0, "reduce_overlap": 0.05, "tensor_overlap": 0.01},
    "megatron-deepspeed": {"reduce_overlap": 0.05, "tensor_overlap": 0.01},
    # Gradients, parameters, exchanges of tensor parallelism and messages are overlapped.
    "megatron-core": {
        "pace": 1.0,
        "fused_share": 1.0,
        "tensor_overlap": 0.3,
        "pipeline_overlap": 0.5,
    },
    "megatron-core-2025": {
        "pace": 1.0,
        "fused_share": 1.3,
        "tensor_overlap": 0.3,
        "pipeline_overlap": 0.5,
    },
    "megatron-core-2026": {
        "pace": 1.0,
        "fused_share": 1.3,
        "tensor_overlap": 0.3,
        "pipeline_overlap": 0.5,
    },
    # Gathers of 2021 went parameter by parameter.
    "deepspeed": {
        "hook_s": 4e-3,
        "gather_share": 0.15,
        "gather_overlap": 0.98,
        "interference": 0.02,
    },
    "deepspeed-2022": {
        "hook_s": 4e-3,
        "gather_share": 0.6,
        "gather_overlap": 0.75,
        "interference": 0.3,
    },
    "jax": COMPILED,
}
NEVER: Mapping[str, frozenset[str]] = {
    "megatron": frozenset({"tensor_overlap", "expert_overlap"}),
    "megatron-deepspeed": frozenset({"tensor_overlap", "expert_overlap"}),
}
"""What a generation does not do, whatever a fit would like: not fitted."""


def priors() -> dict[str, TrainerConstants]:
    """Return every generation of trainers as it is known before a fit: facts, and the middle."""
    return {
        key: replace(facts, **(EAGER | dict(KNOWN.get(key, {}))))
        for key, facts in UNFITTED_FRAMEWORKS.items()
    }
