"""Trainers by generation, and how to recognise one by its name and year.

The facts are of their code: what they overlap, in which dtype gradients add up and travel, what an
optimizer keeps. The numbers beside them (bytes of memory traffic, shares) were fitted to published
runs by `bench/accuracy/fit.py`, each generation as a whole; a trainer that nobody published
a run of has the middle of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.cost.lattice.fitted import FITTED
from echelon.cost.lattice.software import Software

GENERIC = Software(
    fused_share=0.8,
    width_bytes=50.0,
    inner_bytes=10.0,
    host_s=1.2e-5,
    logit_bytes=24.0,
    reduce_overlap=0.5,
    gather_overlap=0.85,
    gather_share=0.9,
    tensor_overlap=0.1,
    expert_overlap=0.2,
    pipeline_overlap=0.05,
    interference=0.1,
)
"""A trainer that is not known: eager kernels, gradients that travel behind half of backward."""

NARROW = replace(GENERIC, gradient_bytes=2.0, reduced_bytes=2.0)
"""Gradients add up and travel in the dtype of parameters."""

LATE_CORE = replace(NARROW, once_per_node=1.0, working_width=8.0, context_bytes=1.5e9)
"""Megatron-Core since 2025: a token crosses to a node once."""
COMPILED: Mapping[str, float] = {
    "width_bytes": 50.0,
    "inner_bytes": 9.0,
    "host_s": 2e-6,
    "mixture_s": 1e-4,
    "reduce_overlap": 0.8,
    "tensor_overlap": 0.2,
}
"""What a compiler of whole programs is known for: before any fit, and where no run tells more."""

FACTS: Mapping[str, Software] = {
    # Of those that nobody tuned for a table, blocks are more kernels.
    "generic": replace(GENERIC, width_bytes=70.0, inner_bytes=13.0, kernels=60.0),
    "echelon": replace(GENERIC, reduce_overlap=0.8, scattered_messages=0.0),
    # Up to 2023: gradients in fp32, nothing sent behind compute, masks of dropout kept.
    "megatron": replace(GENERIC, dropout=1.0),
    # DeepSpeed's engine: gradients in fp16, of which an update makes a copy in fp32.
    "megatron-deepspeed": replace(
        NARROW, state_bytes=17.0, working_width=44.0, context_bytes=8e9, slack=0.0
    ),
    "megatron-core": replace(NARROW, working_width=8.0, context_bytes=1.5e9),
    "megatron-core-2025": LATE_CORE,
    # Rows find their experts on the device, and graphs start the kernels of blocks.
    "megatron-core-2026": LATE_CORE,
    "deepspeed": replace(NARROW, state_bytes=16.0, working_width=54.0, context_bytes=7e9),
    # Since 2022 it gathers parameters of many weights at once, ahead of their use.
    "deepspeed-2022": replace(
        NARROW,
        state_bytes=16.0,
        working_width=54.0,
        context_bytes=7e9,
        gather_share=0.6,
        gather_overlap=0.75,
        interference=0.3,
    ),
    # Composer's loss writes gradients of logits in the place of logits.
    "fsdp": replace(NARROW, logit_held=4.0),
    "fsdp-compiled": NARROW,
    "fsdp2": GENERIC,
    "fsdp2-compiled": GENERIC,
    # A program compiled as a whole (XLA): few kernels, operators fused, collectives beside compute.
    "jax": replace(NARROW, **COMPILED),
    "internevo": replace(
        NARROW, update_bytes=14.0, working_width=54.0, context_bytes=5e9, slack=0.0
    ),
}
"""What the code of each generation does: dtypes, and what it keeps."""

FRAMEWORKS: Mapping[str, Software] = {
    key: replace(facts, **FITTED.get(key, {})) for key, facts in FACTS.items()
}
"""Each generation of trainers, with the constants that published runs tell."""

PREFETCH_SINCE = 2022
"""The year from which DeepSpeed gathers ahead of use."""
CORE_SINCE, CORE_AGAIN, CORE_GRAPHS = 2023, 2025, 2026
"""The years of Megatron-Core, of its kernels and dispatch of 2025, and of its graphs of 2026."""

WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("megatron-deepspeed", ("megatron-deepspeed", "megatron deepspeed", "neox", "megatron-ds")),
    ("jax", ("maxtext", "jax", "levanter", "paxml", "praxis", "easylm", "t5x", "xla", "oneflow")),
    ("megatron-core", ("nemo", "bridge", "megatron-core", "mcore", "megatron core", "primus")),
    ("megatron-core", ("mindspeed", "transformer engine", "transformerengine")),
    ("megatron", ("megatron",)),
    ("echelon", ("echelon",)),
    ("internevo", ("internevo",)),
    ("fsdp2", ("titan", "fsdp2", "fsdp v2", "olmo-core", "olmo core", "vescale", "torchtune")),
    ("fsdp", ("fsdp", "composer", "foundry", "accelerate", "lightning", "axolotl", "fairscale")),
    ("deepspeed", ("deepspeed", "colossal", "zero-")),
)
"""What the names of trainers have in them, the most telling first."""
SECOND_SINCE = 2024
"""The year from which PyTorch's own sharding is that of FSDP2."""


def recognise(name: str, *, year: int, zero: float, compiled: bool = False) -> str:
    """Return the generation in FRAMEWORKS of the trainer called `name` in `year`.

    Megatron-DeepSpeed without ZeRO runs Megatron's own loop; with it, DeepSpeed's engine. A trainer
    that is not known and cuts parameters does so by PyTorch's FSDP.
    """
    lower = name.lower().replace("_", "-")
    found = next((key for key, words in WORDS if any(w in lower for w in words)), "generic")
    if found == "generic" and zero >= 3.0:
        found = "fsdp2" if year >= SECOND_SINCE else "fsdp"
    if found == "megatron-deepspeed" and zero < 1.0:
        return "megatron"
    if found == "deepspeed" and year >= PREFETCH_SINCE:
        return "deepspeed-2022"
    if found == "megatron" and year >= CORE_SINCE:
        found = "megatron-core"
    if found == "megatron-core" and year >= CORE_AGAIN:
        return "megatron-core-2026" if year >= CORE_GRAPHS else "megatron-core-2025"
    return f"{found}-compiled" if found in ("fsdp", "fsdp2") and compiled else found
