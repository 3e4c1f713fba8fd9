"""What a row names of its trainer's settings, and what trainers do where nobody says.

Optional columns of a file of runs override the constants of a row's generation of trainers:

    gradient_dtype    in which gradients add up: fp32, bf16, fp16
    reduction_dtype   in which they travel

What a loss holds `loss_settings.py` tells, and what parameters and states rest in
`memory_settings.py`.

Of what a row leaves blank, `trainer_defaults.toml` tells what the code of its trainer does, each
fact with its file; where that has nothing, the constants are those of the generation.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from bench.accuracy.published.loss_settings import logits_held
from bench.accuracy.published.memory_settings import frees_gradients, is_pure, with_states
from bench.accuracy.published.rows import Refused, Row
from echelon.core.rulebook.config import OUT_OF_RANGE
from echelon.cost.inputs.cost_inputs import TrainerConstants

DTYPE_BYTES: Mapping[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
"""Bytes of an element."""
OWN_LOSS: Mapping[str, float] = {"fused": 2.0, "in-place": 4.0}
"""Bytes that a trainer's own loss holds for each logit: the gradient takes the logit's place, in 16
bits (Transformer Engine), or in fp32 beside it for a while (flash-attention's)."""
FULL = re.compile(r"fp32|tf32|float32")
"""Precisions in which a default of 16 bits says nothing."""
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
    names: tuple[str, ...] = ()
    """What is in the name of the framework of a row that it is for, in small letters."""
    update: str = ""
    """What an optimizer step runs as: fused kernels allocate no copies of gradients."""


@cache
def trainer_defaults() -> Mapping[str, TrainerDefaults]:
    """Return the table by name."""
    text = files("bench.accuracy.published") / "trainer_defaults.toml"
    tables = tomllib.loads(text.read_text(encoding="utf-8"))
    return {
        name: TrainerDefaults(
            **{**table, **{key: tuple(table.get(key, ())) for key in ("trainers", "names")}}
        )
        for name, table in tables.items()
    }


def with_named_settings(row: Row, software: TrainerConstants, generation: str) -> TrainerConstants:
    """Return the constants of a row's trainer with what the row names; Refused for a wrong word.

    What the row does not name, its trainer's defaults tell.
    """
    usual = default_of(row, generation)
    gradients = {name: getattr(usual, name) if usual else "" for name in DTYPE_COLUMNS}
    named: dict[str, float] = {}
    for column, constant in DTYPE_COLUMNS.items():
        word = row.word(column).lower()
        if word and word not in DTYPE_BYTES:
            raise Refused(OUT_OF_RANGE, f"{column} = {word} is none of {', '.join(DTYPE_BYTES)}")
        if not word and gradients[column] in DTYPE_BYTES and not is_pure(row):
            word = gradients[column]
        if word:
            named[constant] = DTYPE_BYTES[word]
    logits = float(software.logit_held)
    if usual and usual.loss in OWN_LOSS and not row.word("loss"):
        logits = OWN_LOSS[usual.loss]
    if float(software.update_bytes) > 0.0:
        # Gradients in fp32 that an update makes are its own.
        named.pop("gradient_bytes", None)
    if float(software.gradient_bytes) == 0.0:
        # They take the place of parameters.
        named.pop("gradient_bytes", None)
    software = replace(with_states(row, software), logit_held=logits_held(row, logits))
    software = replace(software, **named)
    return replace(software, gradient_bytes=0.0) if frees_gradients(row) else software


def default_of(row: Row, generation: str) -> TrainerDefaults | None:
    """Return the entry of the table for a row's trainer, None where none is for it."""
    name, precision = row.word("framework").lower(), row.word("precision").lower()
    for one in trainer_defaults().values():
        if generation not in one.trainers or not one.names:
            continue
        if "fp16" in precision or FULL.match(precision):
            continue
        if any(word in name for word in one.names):
            return one
    return None
