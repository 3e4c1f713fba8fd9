"""What a row names of its trainer's settings, and what trainers do where nobody says.

Optional columns of a file of runs override the constants of a row's generation of trainers:

    gradient_dtype    in which gradients add up: fp32, bf16, fp16
    reduction_dtype   in which they travel
    loss              how logits are held: in-place (gradients in the place of logits), chunked N

A row that names none keeps the constants of its generation. `trainer_defaults.toml` holds what the
code of trainers does, each fact with its file; constants were fitted to rows of which few say which
of a trainer's settings they ran with, so the table is there to fill a row by, and changes none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from bench.accuracy.published.refusals import Refused
from bench.accuracy.published.rows import Row
from echelon.core.rulebook.config import OUT_OF_RANGE
from echelon.cost.seconds.inputs import TrainerConstants

DTYPE_BYTES: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
"""Bytes of an element."""
IN_PLACE_BYTES = 4.0
"""Bytes of a logit whose gradient takes its place, as of the trainer that does so (`fsdp`)."""
DTYPE_COLUMNS: Mapping[str, str] = {
    "gradient_dtype": "gradient_bytes",
    "reduction_dtype": "reduced_bytes",
}
"""Columns of a file, and the constants that they give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDefaults:
    """Hold what a trainer does where nobody says; "" is what was not found."""

    trainers: tuple[str, ...]
    """Generations of `trainer_generations.py` that have it."""
    source: str
    """Files of the project in which it was read."""
    gradient_dtype: str = ""
    reduction_dtype: str = ""
    loss: str = ""
    update: str = ""
    """What an optimizer step runs as: fused kernels allocate no copies of gradients."""


@cache
def trainer_defaults() -> Mapping[str, TrainerDefaults]:
    """Return the table by name."""
    text = files("bench.accuracy.published") / "trainer_defaults.toml"
    tables = tomllib.loads(text.read_text(encoding="utf-8"))
    return {
        name: TrainerDefaults(**{**table, "trainers": tuple(table["trainers"])})
        for name, table in tables.items()
    }


def with_named_settings(row: Row, software: TrainerConstants) -> TrainerConstants:
    """Return the constants of a row's trainer with what the row names; Refused for a wrong word."""
    for column, constant in DTYPE_COLUMNS.items():
        word = row.word(column).lower()
        if not word:
            continue
        if word not in DTYPE_BYTES:
            raise Refused(OUT_OF_RANGE, f"{column} = {word} is none of {', '.join(DTYPE_BYTES)}")
        software = replace(software, **{constant: DTYPE_BYTES[word]})
    return replace(software, logit_held=_logit_held(row, float(software.logit_held)))


def _logit_held(row: Row, usual: float) -> float:
    """Return the bytes that the loss holds for each logit."""
    word = row.word("loss").lower()
    if not word:
        return usual
    chunks = re.fullmatch(r"chunked\s+([1-9]\d{0,6})", word)
    if chunks:
        return usual / float(chunks[1])
    if word == "in-place":
        return IN_PLACE_BYTES
    raise Refused(OUT_OF_RANGE, f"loss = {word} is neither in-place nor chunked N")
