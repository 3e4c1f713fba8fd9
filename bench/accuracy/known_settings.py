"""Of which rows all is known that decides memory: those that a prediction has to hit.

A row's memory is known in all its settings where

- it is the allocator's peak, and the row or its note says so;
- the split, the microbatch, recompute, attention and ZeRO's stage are the row's own, and the
  model's sizes are its own, another row's of the publisher, or those of the model by its name;
- dtypes of gradients and states, and the loss, are named, or the trainer's code has one way only;
- no note of it says what was "inferred:" when the row was written;
- a mixture is balanced by force: how far another is off balance no row tells;
- no CUDA graphs hold pools of their own.

All other rows have to lie inside of their band (`memory_bands.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.accuracy.predict import Prediction
from bench.accuracy.published.memory_settings import is_pure, words_of
from bench.accuracy.published.neighbours import OTHER_ROWS
from bench.accuracy.published.rows import Row
from bench.accuracy.published.trainer_defaults import default_of
from echelon.cost.seconds.trainers import BY_NAME

DECIDE = frozenset(
    {
        *("tp", "pp", "cp", "dp", "ep", "vpp", "sp", "zero_stage", "micro_batch", "global_batch"),
        *("recompute", "flash_attn", "mem_kind", "year", "n_gpus", "seq_len"),
        *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp"),
        *("moe_topk", "moe_ffn", "shared_experts", "params_total", "params_active"),
    }
)
"""Columns that decide memory."""
CERTAIN = (OTHER_ROWS, "of the model by this name")
"""Why a blank has a value that is as good as the row's own."""
RECIPES = re.compile(r"nemo|bridge")
"""Libraries whose recipes differ in dtypes and loss, so that a default tells nothing of a row."""
BALANCED = re.compile(r"forced? balanced?|balanced by force")


def all_settings_known(one: Prediction) -> bool:
    """Return whether all is known that decides the memory of a row's run."""
    case, row = one.case, one.row
    if case is None or one.chosen is None or case.measured.memory_kind != "allocated":
        return False
    guessed = {note.field for note in row.assumed if note.why not in CERTAIN}
    guessed |= {column for column, _ in one.chosen.chosen}
    text = words_of(row)
    if guessed & DECIDE or "inferred:" in text:
        return False
    if case.model.experts and not BALANCED.search(text):
        return False
    if "cuda graph" in text:
        return False
    return _dtypes_known(row, case.program.generation)


def known_rows(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions of rows of which all settings are known."""
    return [one for one in predictions if all_settings_known(one)]


def _dtypes_known(row: Row, generation: str) -> bool:
    """Return whether a row's dtypes and loss are named, or its trainer has one way only."""
    name = row.word("framework").lower()
    if any(key in name for key in BY_NAME):
        return True
    usual = None if RECIPES.search(name) else default_of(row, generation)
    gradients = row.word("gradient_dtype") or (usual.gradient_dtype if usual else "")
    states = row.word("state_dtype") or is_pure(row) or (usual and not row.word("optimizer"))
    return bool(gradients and states and (row.word("loss") or (usual and usual.loss)))
