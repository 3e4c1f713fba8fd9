"""What went wrong, for tests: run files written on the spot, and the problems that they give."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path

from echelon.config.load import load_job
from echelon.core.errors import ConfigError, Problem

SMALL = """
[model]
layers = 6
hidden = 48
heads = 12
kv_heads = 6
ffn = 96
vocab = 300
max_positions = 64

[batch]
global_sequences = 48
microbatch_sequences = 1
sequence_length = 24
"""
"""A run file whose counts have many divisors; the tables that it lacks can be appended."""

SPARSE = f"{SMALL}\n[model.experts]\nnum_experts = 8\ntop_k = 2\nffn = 24\n"
"""The same with experts."""


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    """Write a run file and return its path."""
    path = folder / name
    path.write_text(cleandoc(text) + "\n", encoding="utf-8")
    return path


def problems_of(
    source: Path | str, sets: Sequence[str] = (), *, world_size: int | None = None
) -> dict[str, Problem]:
    """Return the problems of a run by rule id, the first of each rule; none where it loads."""
    try:
        load_job(source, sets, world_size=world_size)
    except ConfigError as error:
        return {problem.rule: problem for problem in reversed(error.problems)}
    return {}
