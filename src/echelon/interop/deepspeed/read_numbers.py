# SPDX-License-Identifier: Apache-2.0
"""What changes the numbers of a DeepSpeed run: dtypes, loss scale, optimizer, scheduler.

Without an optimizer or a scheduler in the JSON those of the run hold.
"""

from __future__ import annotations

from typing import cast

from echelon.core.rulebook.config import WRONG_TYPE
from echelon.core.settings.value_types import Integer, Real, Text
from echelon.interop.abilities import by_word
from echelon.interop.deepspeed.abilities import NAMES, RATE_SCHEDULES, TABLES
from echelon.interop.import_context import ImportContext
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

DTYPES = ("fp32", "fp16", "bf16")
_SCALE_POWER = Integer(minimum=0, maximum=32)


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


def read_precision(reader: KeyReader, context: ImportContext, added: str = "") -> str:
    """Map the dtypes of every role, and return that of gradients as they accumulate.

    `added` is a table that is not in the file, and that who reads it adds, switched on.
    """
    if reader.keys_of("bfloat16") and reader.keys_of("bf16"):
        reader.conflict(
            "bf16 and bfloat16 are one table under two names; keep bf16",
            "precision.parameters",
            reader.where("bf16", "bfloat16"),
            suggestions=("bf16",),
        )
    old_name = "bfloat16" if reader.keys_of("bfloat16") else "bf16"
    on = {
        "fp16": _enabled(reader, "fp16", "fp16", context),
        "bf16": _enabled(reader, old_name, "bf16", context),
    }
    if added:
        on[added], old_name = True, "bf16"
    if all(on.values()):
        reader.conflict(
            f"fp16.enabled and {old_name}.enabled are both true",
            "precision.parameters",
            reader.where("fp16.enabled", f"{old_name}.enabled"),
            suggestions=("fp16.enabled = false", f"{old_name}.enabled = false"),
        )
        return "fp32"
    half = next((dtype for dtype, enabled in on.items() if enabled), None)
    key = {"fp16": "fp16.enabled", "bf16": f"{old_name}.enabled", None: "fp16, bf16"}[half]
    dtype = half or "fp32"
    source = "neither fp16 nor bf16 is on"
    if half is not None:
        source = f"{half} of what reads {reader.path}" if half == added else ""
    reader.set(key, "precision.parameters", dtype, "in forward and backward", source=source)
    gradients = _read_gradients(reader, key, dtype, source)
    reader.set(key, "precision.master", "fp32", "what the optimizer updates", source=source)
    reader.judge(TABLES.keys["fp16"], "fp16.")
    _read_scale(reader, on=half == "fp16")
    reader.judge(TABLES.keys["bf16"], f"{old_name}.")
    return gradients


def _enabled(reader: KeyReader, table: str, dtype: str, context: ImportContext) -> bool:
    key = f"{table}.enabled"
    if reader.is_auto(key):
        on = context.parameters == dtype
        reader.skip(key, f"precision.parameters of what the run builds on: {context.parameters}")
        return on
    on = reader.flag(key, setting="precision.parameters")
    if on is False:
        reader.skip(key, "off")
    return bool(on)


def _read_gradients(reader: KeyReader, enabled: str, dtype: str, source: str) -> str:
    roles = (
        ("data_types.grad_accum_dtype", "precision.gradients", "as they accumulate"),
        ("communication_data_type", "precision.reduction", "as they are summed over ranks"),
    )
    found: list[str] = []
    for key, setting, why in roles:
        word = reader.word(key, DTYPES, setting=setting)
        if word is None:
            reason = f"{why}: as the parameters, unless {key} says more"
            reader.set(enabled, setting, dtype, reason, source=source)
        else:
            reader.set(key, setting, word, why)
        found.append(word or dtype)
    return found[0]


def _read_scale(reader: KeyReader, *, on: bool) -> None:
    """Map the loss scale: 0 follows the overflows, any other is fixed."""
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis")
    keys = [f"fp16.{name}" for name in (*names, "min_loss_scale", "consecutive_hysteresis")]
    if not on:
        reader.skip_all(keys, "fp16 is off")
        return
    scale_key, power_key, window_key, hysteresis_key, least_key, consecutive_key = keys
    scale = reader.number(scale_key, NUMBER, setting="precision.loss_scale")
    if scale:
        reader.set(scale_key, "precision.loss_scaling", "fixed", "0 would let it follow overflows")
        reader.set(scale_key, "precision.loss_scale", scale, "factor of the loss")
        reader.skip_all(keys[1:], "the scale is fixed")
        return
    why = "0 follows the overflows"
    reader.set_or_default(scale_key, "precision.loss_scaling", "dynamic", why)
    power = reader.integer(power_key, _SCALE_POWER, setting="precision.loss_scale")
    source = reader.default if power is None else ""
    power = 16 if power is None else power
    reader.set(power_key, "precision.loss_scale", 2.0**power, f"2^{power}", source=source)
    _read_count(reader, window_key, "loss_scale_window", 1000, "steps until it doubles")
    why = "overflows until it halves"
    patience = _read_count(reader, hysteresis_key, "loss_scale_hysteresis", 2, why)
    least = float(reader.integer(least_key, FROM_ZERO) or 1)
    reader.set_or_default(least_key, "precision.loss_scale_min", least, "it never falls below")
    refilled = (False, True) if patience == 1 else (False,)
    why = "overflows are counted since the scale last grew"
    reader.only(consecutive_key, refilled, why)


def _read_count(reader: KeyReader, key: str, name: str, default: int, why: str) -> int:
    count = reader.integer(key, COUNT)
    count = default if count is None else count
    reader.set_or_default(key, f"precision.{name}", count, why)
    return count
