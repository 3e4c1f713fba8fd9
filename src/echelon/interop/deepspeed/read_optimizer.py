# SPDX-License-Identifier: Apache-2.0
"""The optimizer and the scheduler of a DeepSpeed JSON; without them the run's own hold."""

from __future__ import annotations

from typing import cast

from echelon.config.settings.value_types import Real, Text
from echelon.core.rulebook.config import WRONG_TYPE
from echelon.interop.abilities import by_word
from echelon.interop.deepspeed.abilities import NAMES, RATE_SCHEDULES, TABLES
from echelon.interop.key_reader import BETA, COUNT, FRACTION, FROM_ZERO, NUMBER, POSITIVE, KeyReader

KIND = "optimizer.type"
_OF_BASE = "that of what the run builds on"

_OTHER_TYPES = TABLES.keys["optimizer_types"]
OPTIMIZERS = {
    "adam": "adamw",
    **{w.lower(): k for k, w in NAMES.optimizers.items() if w.lower() not in _OTHER_TYPES},
}
SCHEDULES = by_word(RATE_SCHEDULES)
REFUSED_SCHEDULES = {
    "LRRangeTest": "the learning rate never rises through a run to find its limit",
    "OneCycle": "there is no cycle of rate and momentum",
}
_WARMUP_STEPS = 1000  # DeepSpeed's default.


def read_optimizer(reader: KeyReader) -> None:
    """Map the optimizer; "auto" leaves a value to what the run builds on."""
    name = _type_of(reader, "optimizer", "optimizer.kind")
    if name is None:
        return
    kind = OPTIMIZERS.get(name.lower())
    if kind is not None:
        why = "weight decay is decoupled in both" if kind == "adamw" else "as torch.optim.SGD"
        reader.set(KIND, "optimizer.kind", kind, why)
    else:
        other = _OTHER_TYPES.get(name.lower())
        why = other.why if other else "there is no such optimizer"
        reader.refuse(KIND, why, suggestions=('"AdamW"', '"SGD"'), setting="optimizer.kind")
    _value(reader, "lr", "learning_rate", POSITIVE, "at its peak")
    _read_moments(reader, kind)
    why = "of matrices, as Hugging Face groups parameters; optimizer.decay says which"
    none = (0.0, "DeepSpeed has none by default")
    _value(reader, "weight_decay", "weight_decay", NUMBER, why, default=none)
    reader.judge(TABLES.keys["optimizer"], "optimizer.")


def _type_of(reader: KeyReader, table: str, setting: str) -> str | None:
    """Return the type that a table names; None where there is no table, or none that counts."""
    key = f"{table}.type"
    given = [name for name in reader.keys_of(table) if name != table and reader.has(name)]
    if not given:
        return None
    name = reader.read(key, Text(), setting=setting)
    if isinstance(name, str):
        return name
    if not reader.has(key):
        why = f"DeepSpeed does without {table} then, whatever else it says"
        reader.refuse(key, why, suggestions=(f"no {table}",), setting=setting)
    reader.know_table(table)
    return None


def _value(
    reader: KeyReader,
    name: str,
    setting: str,
    kind: Real,
    why: str,
    *,
    default: tuple[float, str] | None = None,
) -> None:
    """Map a parameter; where it is absent, to a value of DeepSpeed's own if there is one."""
    key, setting = f"optimizer.params.{name}", f"optimizer.{setting}"
    if default is not None and not reader.has(key):
        reader.set(key, setting, *default, source=reader.default)
        return
    reader.take(key, setting, kind, why, auto=_OF_BASE)


def _read_moments(reader: KeyReader, kind: str | None) -> None:
    betas, eps, momentum = (f"optimizer.params.{name}" for name in ("betas", "eps", "momentum"))
    if kind == "sgd":
        reader.skip_all((betas, eps), "SGD does not use it")
        none = (0.0, "torch.optim.SGD has none by default")
        _value(reader, "momentum", "momentum", BETA, "of the gradients", default=none)
        return
    reader.skip(momentum, "Adam does not use it")
    _read_betas(reader, betas)
    _value(reader, "eps", "eps", POSITIVE, "added to the root of the second moment")


def _read_betas(reader: KeyReader, key: str) -> None:
    if reader.is_auto(key):
        reader.skip(key, _OF_BASE)
        return
    if not reader.has(key):
        for setting, value in (("beta1", 0.9), ("beta2", 0.999)):
            reader.set(key, f"optimizer.{setting}", value, "default of Adam", source=reader.default)
        return
    value = reader.given[key]
    pair = cast("list[object]", value) if isinstance(value, list) else []
    if len(pair) != 2 or any(BETA.check(item) for item in pair):
        message = f"{key} = {reader.text(key)} is not two numbers from 0 to below 1"
        reader.note(WRONG_TYPE, message, "optimizer.beta1", reader.where(key), ("[0.9, 0.999]",))
        return
    reader.set(key, "optimizer.beta1", pair[0], "decay of the first moment")
    reader.set(key, "optimizer.beta2", pair[1], "decay of the second moment")


def read_scheduler(reader: KeyReader) -> None:
    """Map the schedule of the learning rate: a linear warm-up, then one of three shapes."""
    name = _type_of(reader, "scheduler", "optimizer.schedule")
    if name is None:
        return
    key, schedule = "scheduler.type", SCHEDULES.get(name)
    if schedule is not None:
        reader.set(key, "optimizer.schedule", schedule, "after the warm-up")
    else:
        why = REFUSED_SCHEDULES.get(name, "there is no such schedule")
        reader.refuse(
            key, why, suggestions=map('"{}"'.format, SCHEDULES), setting="optimizer.schedule"
        )
        reader.know_table("scheduler")
        return
    _read_warmup(reader)
    _read_peak(reader, schedule)
    _read_end(reader, schedule)
    reader.only("scheduler.params.last_batch_iteration", (-1,), "a schedule starts with its run")


def _read_warmup(reader: KeyReader) -> None:
    prefix = "scheduler.params"
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        key = f"{prefix}.{name}"
        if reader.is_auto(key):
            reader.skip(key, "0: the warm-up starts there")
        else:
            reader.only(key, (0, 0.0), "the warm-up starts at 0 (its first step is peak / steps)")
    key, setting = f"{prefix}.warmup_num_steps", "optimizer.warmup_steps"
    kind_key = f"{prefix}.warmup_type"
    if reader.is_auto(key):
        reader.skip(key, _OF_BASE)
        reader.only(kind_key, ("linear",), "the warm-up is linear", setting=setting)
        return
    steps = reader.integer(key, FROM_ZERO, setting=setting)
    given = reader.has(key)
    steps = _WARMUP_STEPS if not given else steps
    if steps is None:
        return
    reader.set(key, setting, steps, "linear rise", source="" if given else reader.default)
    if reader.has(kind_key):
        reader.only(kind_key, ("linear",), "the warm-up is linear", setting=setting)
    elif steps > 1:
        why = "DeepSpeed's warm-up is logarithmic by default, and here it is linear"
        reader.refuse(kind_key, why, suggestions=(f'{kind_key} = "linear"',), setting=setting)


def _read_peak(reader: KeyReader, schedule: str) -> None:
    key, setting = "scheduler.params.warmup_max_lr", "optimizer.learning_rate"
    if schedule == "linear" and not reader.has(key):
        # Not that of the optimizer: the two conflict where they differ.
        reader.set(key, setting, 0.001, "default of WarmupDecayLR", source=reader.default)
        return
    reader.take(key, setting, POSITIVE, "at the end of the warm-up", auto=_OF_BASE)


def _read_end(reader: KeyReader, schedule: str) -> None:
    key = "scheduler.params.total_num_steps"
    if schedule == "constant" and not reader.is_auto(key):
        reader.skip(key, "a constant learning rate has no end")
    else:
        auto = "train.steps of what the run builds on"
        reader.take(key, "train.steps", COUNT, "the schedule ends with the run", auto=auto)
    key, setting = "scheduler.params.cos_min_ratio", "optimizer.final_ratio"
    if schedule != "cosine":
        reader.skip(key, "it is about WarmupCosineLR")
        if schedule == "linear":
            reader.set("scheduler.type", setting, 0.0, "WarmupDecayLR falls to 0")
        return
    if not reader.has(key):
        reader.set(key, setting, 0.0001, "default of WarmupCosineLR", source=reader.default)
    reader.take(key, setting, FRACTION, "last / peak learning rate")
