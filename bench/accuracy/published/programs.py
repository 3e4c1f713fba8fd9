"""The program of a row: its generation of trainers, and what it does where a row is silent."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bench.accuracy.published.loss_settings import COMPILED_PURE, compiles_loss
from bench.accuracy.published.memory_settings import (
    FP8_COPIES,
    VALUE_BYTES,
    drops_out,
    is_compiled,
    is_pure,
    keeps_on_host,
    reduces_copies,
    updates_in_lists,
    words_of,
)
from bench.accuracy.published.rows import Row
from bench.accuracy.published.trainer_defaults import with_named_settings
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.seconds.trainers import BY_NAME, COMPILED_GRAPH, FRAMEWORKS

FLASH_SINCE = 2023
"""The year from which runs use fused attention, where nothing is said (FlashAttention: 2022)."""
FULL_PRECISION = re.compile(r"fp32|tf32|float32")

EVERY_WEIGHT = 1e15
"""More weights than a model has."""
ALONE_BYTES = 0.8e9
"""Bytes of the context of a device that talks to none: no buffers of collectives."""

STAGES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (2.0, ("shard grad",)),
    (0.0, ("no shard", "ddp", "none", "false")),
    (3.0, ("hsdp", "hybrid", "full shard", "fsdp", "fully")),
    (1.0, ("distributed opt", "dist opt", "true")),
)
"""The stage of ZeRO that a word in its place means."""

PREFETCH_SINCE = 2022
"""The year from which DeepSpeed gathers ahead of use."""
CORE_SINCE = 2023
"""The year of Megatron-Core."""
CORE_AGAIN = 2025
"""The year of its later kernels and dispatch."""
CORE_GRAPHS = 2026
"""The year of its graphs."""

NAME_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("megatron-deepspeed", ("megatron-deepspeed", "megatron deepspeed", "neox", "megatron-ds")),
    ("fsdp2", ("automodel",)),
    ("fsdp2-compiled", ("llm.c", "llm.q", "llmq")),
    ("jax", ("maxtext", "jax", "levanter", "paxml", "praxis", "easylm", "t5x", "xla", "oneflow")),
    ("megatron-core", ("nemo", "bridge", "megatron-core", "mcore", "megatron core", "primus")),
    ("megatron-core", ("mindspeed", "transformer engine", "transformerengine")),
    ("megatron", ("megatron",)),
    ("echelon", ("echelon",)),
    ("internevo", ("internevo",)),
    ("deepspeed", ("deepspeed", "colossal", "gemini")),
    ("fsdp2", ("titan", "fsdp2", "fsdp v2", "olmo-core", "olmo core", "vescale", "torchtune")),
    ("fsdp", ("fsdp", "composer", "foundry", "accelerate", "lightning", "axolotl", "fairscale")),
    ("deepspeed", ("zero-",)),
)
"""What the names of trainers have in them, the most telling first."""
OTHER_NAMES = ("litgpt", "thunder")
"""What names of projects have in them that run by generic facts."""
SECOND_SINCE = 2024
"""The year from which PyTorch's own sharding is that of FSDP2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Give a program's generation, its ZeRO stage, and whether its attention is fused."""

    generation: str
    zero: float
    fused: bool

    @property
    def is_core(self) -> bool:
        """Return whether this is Megatron-Core, or what is built on it."""
        return self.generation.startswith("megatron-core")

    @property
    def sequence_parallel(self) -> bool:
        """Return whether tensor parallelism comes with sequence parallelism."""
        return self.is_core

    @property
    def interleaves(self) -> bool:
        """Return whether a pipeline is interleaved where nothing is said."""
        return self.is_core

    @property
    def pads_vocabulary(self) -> bool:
        """Return whether the vocabulary is padded to a multiple of 128 x tp."""
        return self.generation.startswith("megatron")


def program_of(row: Row) -> Program:
    """Return the program of a row: its framework's generation in its year."""
    name = row.word("framework")
    year = row.number("year")
    if year is None:
        year = row.assume("year", float(FLASH_SINCE), "the middle of published runs")
    zero = _stage(row)
    if zero is None:
        zero = row.assume("zero_stage", _usual_stage(name, int(year)), "the framework's default")
    # Thunder compiles a program too, though it keeps what a model as it is written keeps.
    compiled = "thunder" in name.lower() or bool(is_compiled(row))
    fused = row.flag("flash_attn")
    if fused is None:
        fused = year >= FLASH_SINCE
        row.say("flash_attn", fused, "usual in its year")
    generation = framework_from_name(name, year=int(year), zero=zero, compiled=compiled)
    return Program(generation=generation, zero=zero, fused=fused)


def framework_from_name(name: str, *, year: int, zero: float, compiled: bool = False) -> str:
    """Return the generation in FRAMEWORKS of the trainer called `name` in `year`.

    Megatron-DeepSpeed without ZeRO runs Megatron's own loop; with it, DeepSpeed's engine. A trainer
    that is not known and cuts parameters does so by PyTorch's FSDP.
    """
    lower = name.lower().replace("_", "-")
    found = next((key for key, words in NAME_PATTERNS if any(w in lower for w in words)), "generic")
    if found == "generic" and (zero >= 3.0 or compiled):
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


def _is_named(row: Row) -> bool:
    """Return whether a row's trainer is a project that is known."""
    lower = row.word("framework").lower().replace("_", "-")
    known = any(word in lower for _, words in NAME_PATTERNS for word in words)
    return known or any(word in lower for word in OTHER_NAMES)


def software_of(row: Row, program: Program) -> TrainerConstants:
    """Return the facts of a row's program in its precision, and with the settings it names."""
    software = _as_compiled(row, program, _software_in_precision(row, program))
    software = with_named_settings(row, software, program.generation)
    if not _is_named(row):
        # An optimizer of the host, without more, leaves gradients where they are.
        software = replace(software, offloads_gradients=0.0)
    if keeps_on_host(row):
        software = replace(software, saved_away=1.0)
    if reduces_copies(row):
        software = replace(software, bucket_weights=EVERY_WEIGHT)
    if row.count("n_gpus") == 1:
        software = replace(software, context_bytes=ALONE_BYTES)
    return software


def _as_compiled(row: Row, program: Program, software: TrainerConstants) -> TrainerConstants:
    """Return the constants with what a compiler changes of memory, and fp8 copies of weights."""
    if program.is_core:
        software = replace(software, dropout=float(drops_out(row)))
    if program.is_core and re.search(r"fp8|float8", row.word("precision").lower()):
        # NVIDIA's recipes of fp8 keep no copy of a weight in 16 bits.
        primary = re.search(r"nemo|bridge|fp8[-_]param", words_of(row))
        return replace(software, cast_bytes=0.0 if primary else FP8_COPIES)
    if program.generation == "generic" and is_compiled(row):
        software = replace(software, **COMPILED_GRAPH)
        return replace(software, logit_held=COMPILED_PURE) if is_pure(row) else software
    if program.generation == "generic" and updates_in_lists(row):
        return replace(software, update_bytes=VALUE_BYTES["bf16" if is_pure(row) else "fp32"])
    if program.generation == "fsdp2-compiled" and compiles_loss(row):
        return replace(software, logit_held=COMPILED_PURE)
    if is_compiled(row) and program.zero < 1.0 and not _is_named(row):
        # A script of one's own compiles its model with its loss.
        whole = COMPILED_PURE if is_pure(row) else COMPILED_GRAPH["logit_held"]
        return replace(software, logit_held=whole)
    return software


def _software_in_precision(row: Row, program: Program) -> TrainerConstants:
    software = replace(FRAMEWORKS[program.generation], fused_attention=float(program.fused))
    name = row.word("framework").lower()
    software = replace(software, **next((one for key, one in BY_NAME.items() if key in name), {}))
    precision = row.word("precision").lower()
    if FULL_PRECISION.match(precision):
        return replace(
            software, element_bytes=4.0, gradient_bytes=4.0, reduced_bytes=4.0, state_bytes=8.0
        )
    if re.search(r"fp32 grad", precision) and float(software.gradient_bytes) < 4.0:
        # DeepSpeed's BF16_Optimizer adds up in fp32 beside the gradients of the backward pass.
        more = float(software.gradient_bytes) + 4.0
        return replace(software, gradient_bytes=more, reduced_bytes=4.0)
    return software


def _stage(row: Row) -> float | None:
    """Return the ZeRO stage of a row: a number, or what its framework calls it; None if blank."""
    text = row.word("zero_stage").lower().replace("_", " ")
    for stage, words in STAGES:
        if any(word in text for word in words):
            return stage
    found = re.search(r"(?<![\d.])(?<!^-)([0-3])(?![\d.])", text)
    if found:
        return float(found[1])
    if text:
        row.say("zero_stage", "unknown", f'"{text}" is no stage of ZeRO')
    return None


def _usual_stage(name: str, year: int) -> float:
    """Return the ZeRO stage of a framework where none is given."""
    words = name.lower()
    said = re.search(r"zero[\s-]*([0-3])", words)
    if said:
        return float(said[1])
    generation = framework_from_name(name, year=year, zero=1.0)
    if generation.startswith(("fsdp", "deepspeed", "jax")):
        return 3.0
    return 0.0 if generation == "megatron" else 1.0
