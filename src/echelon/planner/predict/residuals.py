"""How far off runs are that were not fitted: four in five are no farther.

Written by `python -m bench.accuracy.residuals --write LEFT.csv` from runs that the same command
left out of its fits. STEP: of dense models and of mixtures of experts, by trainer and device, how
far the logarithm of a step's seconds is off where a run's publisher was left out; LEFT_OUT: where
its trainer was, or its device. HELD: between which factors bytes lie that are not counted. PAIRS:
by how much the ratio of two plans' seconds is off, in logarithms, where predictions are near and
where they are far. `planner/explain/bands.py` reads this.
"""

from __future__ import annotations

from collections.abc import Mapping

Factors = tuple[float, float]

UNKNOWN = "other"
"""What a trainer or a device is called that is none of those of which runs were published."""

STEP: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "dense": {
        "deepspeed": {
            "A100": 0.316,
        },
        "deepspeed-2022": {
            "H100": 0.338,
        },
        "fsdp": {
            "A100": 0.114,
            "H100": 0.175,
        },
        "fsdp-compiled": {
            "A100": 0.435,
            "H100": 0.435,
        },
        "fsdp2": {
            "A100": 0.037,
            "H100": 0.338,
        },
        "fsdp2-compiled": {
            "H100": 0.163,
        },
        "internevo": {
            "A100": 0.177,
        },
        "jax": {
            "A100": 0.416,
            "H100": 0.458,
            "V100": 0.313,
        },
        "megatron": {
            "A100": 0.155,
            "V100": 0.232,
            "other": 0.338,
        },
        "megatron-core": {
            "A100": 0.338,
            "H100": 0.152,
            "other": 0.338,
        },
        "megatron-core-2025": {
            "B200": 0.06,
            "GB200": 0.09,
            "GB300": 0.338,
            "H100": 0.082,
        },
        "megatron-core-2026": {
            "GB200": 0.171,
            "GB300": 0.181,
            "H100": 0.143,
            "MI300X": 0.338,
        },
        "megatron-deepspeed": {
            "A100": 0.106,
        },
        "other": {
            "A100": 0.362,
            "H100": 0.6,
        },
    },
    "experts": {
        "fsdp2": {
            "H100": 0.504,
        },
        "megatron-core": {
            "H100": 0.101,
        },
        "megatron-core-2025": {
            "B200": 0.576,
            "GB200": 0.197,
            "GB300": 0.278,
            "H100": 0.267,
        },
        "megatron-core-2026": {
            "B200": 0.309,
            "B300": 0.284,
            "GB200": 0.325,
            "GB300": 0.486,
            "H100": 0.28,
        },
    },
}
LEFT_OUT: Mapping[str, Mapping[str, float]] = {
    "trainer": {"dense": 0.196, "experts": 0.298},
    "device": {"dense": 0.207, "experts": 0.305},
}
HELD: Factors = (0.658, 1.185)
PAIRS: Mapping[str, float] = {"near": 0.161, "far": 0.207}
RUNS: Mapping[str, int] = {"dense": 1023, "experts": 126, "held": 110}
MOST_DEVICES = 10752  # devices
