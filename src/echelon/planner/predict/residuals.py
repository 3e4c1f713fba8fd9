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
        "deepspeed": {"A100": 0.168},
        "fsdp": {"A100": 0.133, "H100": 0.295},
        "fsdp-compiled": {"A100": 0.168, "H100": 0.168},
        "fsdp2": {"A100": 0.168},
        "internevo": {"A100": 0.191},
        "megatron": {"A100": 0.288},
        "megatron-core": {"H100": 0.168},
        "megatron-core-2025": {"H100": 0.168},
        "megatron-core-2026": {"H100": 0.168},
        "megatron-deepspeed": {"A100": 0.226},
    },
    "experts": {
        "megatron-core-2025": {"H100": 0.339},
        "megatron-core-2026": {"H100": 0.339},
    },
}
LEFT_OUT: Mapping[str, Mapping[str, float]] = {
    "trainer": {"dense": 0.215, "experts": 0.295},
    "device": {"dense": 0.217, "experts": 0.374},
}
HELD: Factors = (0.864, 1.198)
PAIRS: Mapping[str, float] = {"near": 0.156, "far": 0.244}
RUNS: Mapping[str, int] = {"dense": 729, "experts": 10, "held": 109}
MOST_DEVICES = 6144  # devices
