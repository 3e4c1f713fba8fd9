# SPDX-License-Identifier: Apache-2.0
"""How far off runs are that were not fitted: four in five are no farther.

Written by `python -m bench.accuracy.residuals --write LEFT.csv` from runs that the same command
left out of its fits. STEP: of dense models and of mixtures of experts, by trainer and device, how
far the logarithm of a step's seconds is off where a run's publisher was left out; LEFT_OUT: where
its trainer was, or its device. HELD: between which factors bytes lie that are not counted. PAIRS:
by how much the ratio of two plans' seconds is off, in logarithms, where predictions are near and
where they are far. `planner/predict/bands.py` reads this.
"""

from __future__ import annotations

from collections.abc import Mapping

Factors = tuple[float, float]

UNKNOWN = "other"
"""What a trainer or a device is called that is none of those of which runs were published."""

STEP: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "dense": {
        "deepspeed": {"A100": 0.322},
        "deepspeed-2022": {"H100": 0.339},
        "fsdp": {"A100": 0.083, "H100": 0.14},
        "fsdp-compiled": {"A100": 0.437, "H100": 0.437},
        "fsdp2": {"A100": 0.045, "H100": 0.339},
        "fsdp2-compiled": {"H100": 0.171},
        "internevo": {"A100": 0.099},
        "jax": {"A100": 0.42, "H100": 0.442, "V100": 0.317},
        "megatron": {"A100": 0.137, "V100": 0.225, "other": 0.339},
        "megatron-core": {"A100": 0.339, "H100": 0.153, "other": 0.339},
        "megatron-core-2025": {"B200": 0.056, "GB200": 0.087, "GB300": 0.339, "H100": 0.092},
        "megatron-core-2026": {"GB200": 0.166, "GB300": 0.185, "H100": 0.154, "MI300X": 0.339},
        "megatron-deepspeed": {"A100": 0.142},
        "other": {"A100": 0.172, "H100": 0.554},
    },
    "experts": {
        "fsdp2": {"H100": 0.502},
        "megatron-core": {"H100": 0.101},
        "megatron-core-2025": {"B200": 0.274, "GB200": 0.198, "GB300": 0.277, "H100": 0.271},
        "megatron-core-2026": {
            "B200": 0.307,
            "B300": 0.282,
            "GB200": 0.329,
            "GB300": 0.487,
            "H100": 0.282,
        },
    },
}
LEFT_OUT: Mapping[str, Mapping[str, float]] = {
    "trainer": {"dense": 0.188, "experts": 0.295},
    "device": {"dense": 0.18, "experts": 0.3},
}
HELD: Factors = (0.658, 1.185)
PAIRS: Mapping[str, float] = {"near": 0.161, "far": 0.21}
RUNS: Mapping[str, int] = {"dense": 1023, "experts": 126, "held": 110}
MOST_DEVICES = 10752  # devices
