"""Trainers by generation, and how to recognise one by its name and year.

The facts are of their code: what they overlap, in which dtype gradients add up and travel, what an
optimizer keeps. The numbers beside them (bytes of memory traffic, shares) were fitted to published
runs by `bench/accuracy/fit.py`, each generation as a whole; a trainer that nobody published
a run of has the middle of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.cost.lattice.software import Software

GENERIC = Software(width_bytes=50.0, inner_bytes=10.0, fused_share=0.8, reduce_overlap=0.5)
"""A trainer that is not known: eager kernels, gradients that travel behind half of backward."""

MEGATRON = replace(
    GENERIC,
    width_bytes=28.0,
    inner_bytes=7.7,
    host_s=2.3e-5,
    logit_bytes=29.0,
    reduced_bytes=2.0,
    reduce_overlap=0.07,
    pipeline_overlap=0.04,
    step_s=0.008,
    dropout=1.0,
)
"""Megatron-LM up to 2023: fused norms and softmax, nothing sent behind compute."""

CORE_SINCE, CORE_AGAIN = 2023, 2025
"""The years of Megatron-Core, and of its attention kernels and dispatch of 2025."""

FRAMEWORKS: Mapping[str, Software] = {
    "generic": GENERIC,
    "echelon": replace(GENERIC, reduce_overlap=0.8, scattered_messages=0.0),
    "megatron": MEGATRON,
    "megatron-deepspeed": replace(
        MEGATRON,
        width_bytes=137.0,
        inner_bytes=11.3,
        host_s=6e-6,
        logit_bytes=24.0,
        gradient_bytes=2.0,
        state_bytes=16.0,
        working_width=54.0,
        context_bytes=4.5e9,
        slack=0.0,
    ),
    "megatron-core": replace(
        GENERIC,
        width_bytes=69.0,
        inner_bytes=8.3,
        logit_bytes=66.0,
        reduce_overlap=0.95,
        pipeline_overlap=0.7,
        tensor_overlap=0.95,
        fused_share=1.0,
        step_s=0.024,
    ),
    "megatron-core-2025": replace(
        GENERIC,
        width_bytes=82.0,
        inner_bytes=7.0,
        logit_bytes=80.0,
        reduce_overlap=0.6,
        pipeline_overlap=0.7,
        tensor_overlap=0.95,
        fused_share=1.5,
        once_per_node=1.0,
        step_s=0.011,
    ),
    "deepspeed": replace(
        GENERIC,
        reduced_bytes=2.0,
        gradient_bytes=2.0,
        gather_overlap=0.95,
        gather_share=0.155,
        interference=0.38,
        state_bytes=16.0,
        working_width=54.0,
        context_bytes=4.5e9,
    ),
    "fsdp": replace(
        GENERIC,
        reduced_bytes=2.0,
        gradient_bytes=2.0,
        logit_bytes=20.0,
        fused_share=0.52,
        gather_overlap=0.88,
        gather_share=0.88,
        interference=0.44,
        reduce_overlap=0.37,
        step_s=0.026,
    ),
    "fsdp-compiled": replace(
        GENERIC,
        width_bytes=44.0,
        inner_bytes=9.0,
        reduced_bytes=2.0,
        gradient_bytes=2.0,
        fused_share=0.87,
        gather_overlap=0.94,
        gather_share=0.88,
        interference=0.1,
        step_s=0.006,
    ),
    "fsdp2": replace(
        GENERIC,
        gradient_bytes=4.0,
        fused_share=0.7,
        gather_overlap=0.85,
        gather_share=0.84,
        interference=0.5,
        step_s=0.012,
    ),
    "internevo": replace(
        GENERIC,
        width_bytes=100.0,
        inner_bytes=14.0,
        reduced_bytes=2.0,
        gradient_bytes=2.0,
        reduce_overlap=0.24,
        step_s=0.02,
        update_bytes=11.0,
        working_width=54.0,
        context_bytes=5e9,
        slack=0.0,
    ),
}


WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("megatron-deepspeed", ("megatron-deepspeed", "megatron deepspeed")),
    ("megatron-core", ("nemo", "bridge", "megatron-core", "mcore", "megatron core")),
    ("megatron", ("megatron",)),
    ("echelon", ("echelon",)),
    ("internevo", ("internevo",)),
    ("fsdp2", ("titan", "fsdp2")),
    ("fsdp", ("fsdp", "composer", "foundry", "accelerate", "lightning")),
    ("deepspeed", ("deepspeed", "colossal")),
)
"""What the names of trainers have in them, the most telling first."""


def recognise(name: str, *, year: int, zero: float, compiled: bool = False) -> str:
    """Return the generation in FRAMEWORKS of the trainer called `name` in `year`.

    Megatron-DeepSpeed without ZeRO runs Megatron's own loop; with it, DeepSpeed's engine.
    """
    lower = name.lower()
    found = next((key for key, words in WORDS if any(w in lower for w in words)), "generic")
    if found == "megatron-deepspeed" and zero < 1.0:
        return "megatron"
    if found == "megatron" and year >= CORE_SINCE:
        found = "megatron-core"
    if found == "megatron-core" and year >= CORE_AGAIN:
        return "megatron-core-2025"
    return "fsdp-compiled" if found == "fsdp" and compiled else found
