# SPDX-License-Identifier: Apache-2.0
"""The dtypes and the loss scale of a DeepSpeed JSON: fp16, bf16, data_types, communication."""

from __future__ import annotations

from echelon.config.settings.value_types import Integer
from echelon.interop.deepspeed.abilities import TABLES
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, NUMBER, KeyReader

DTYPES = ("fp32", "fp16", "bf16")
_SCALE_POWER = Integer(minimum=0, maximum=32)


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
