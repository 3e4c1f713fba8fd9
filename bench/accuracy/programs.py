"""The program of a row: its family, by name, and what it does where a row is silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.accuracy.rows import Row

Family = Literal["megatron-core", "megatron", "megatron-deepspeed", "deepspeed", "fsdp", "other"]
FLASH_SINCE = 2023.0
"""The year from which runs use fused attention, where nothing is said (FlashAttention: 2022)."""
WORDS: tuple[tuple[Family, tuple[str, ...]], ...] = (
    ("megatron-core", ("nemo", "bridge", "megatron-core", "mcore", "maxtext")),
    ("megatron-deepspeed", ("megatron-deepspeed", "megatron deepspeed")),
    ("megatron", ("megatron",)),
    ("deepspeed", ("deepspeed", "zero")),
    ("fsdp", ("fsdp", "torchtitan", "composer", "foundry", "lightning", "accelerate")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Give a program's family, and its ZeRO stage, sequence parallelism, fused attention."""

    family: Family
    zero: float
    sequence_parallel: bool
    fused: bool

    @property
    def pads_vocabulary(self) -> bool:
        """Return whether the vocabulary is padded to a multiple of 128 x tp."""
        return "megatron" in self.family


def program_of(row: Row) -> Program:
    """Return the program of a row: its framework's family in its year."""
    name = row.word("framework").lower()
    year = row.number("year") or FLASH_SINCE
    family: Family = "other"
    for candidate, words in WORDS:
        if any(word in name for word in words):
            family = candidate
            break
    if family == "megatron" and year >= 2024:
        family = "megatron-core"
    zero = {"fsdp": 3.0, "deepspeed": 3.0, "megatron-core": 1.0, "other": 1.0}.get(family, 0.0)
    for stage in (1.0, 2.0, 3.0):
        if f"zero-{stage:g}" in name or f"zero{stage:g}" in name or f"zero {stage:g}" in name:
            zero = stage
    return Program(
        family=family,
        zero=zero,
        sequence_parallel=family == "megatron-core",
        fused=year >= FLASH_SINCE,
    )
