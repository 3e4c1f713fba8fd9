"""What the parts of `bench.context` are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.context.spec import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """Hold what the command line says."""

    part: Literal["table", "exposed", "memory"]
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    heads: tuple[Heads, ...]
    dtype: str
    rounds: int
    steps: int
    mbit: float | None
    limit_bytes: int
    layers: int
    fit: bool
    json: Path | None
    logs: Path
