"""The dtypes and the loss scale of a DeepSpeed JSON: fp16, bf16, data_types, communication."""

from __future__ import annotations

from echelon.config.foreign.ledger import COUNT, FROM_ZERO, NUMBER, Ledger
from echelon.config.foreign.surroundings import Surroundings
from echelon.config.kinds import Integer

HALVES = ("fp16", "bf16")
ROLES = ("parameters", "gradients", "reduction", "master")
DTYPES = ("fp32", "fp16", "bf16")
SCALE_POWER = Integer(minimum=0, maximum=32)

FP16_NOT_NEEDED = {
    "auto_cast": "tokens are whole numbers, and what they become has the parameters' dtype",
    "fused_mode": "one fused call per bucket",
}
BF16_NOT_NEEDED = {
    "check_grad_overflow": "a norm that is no number always ends the run",
    "immediate_grad_update": "a gradient is reduced as soon as its bucket is full",
}


def read_precision(ledger: Ledger, around: Surroundings) -> str:
    """Map the dtypes of every role, and return that of gradients as they accumulate."""
    if ledger.keys_of("bfloat16") and ledger.keys_of("bf16"):
        ledger.conflict(
            "bf16 and bfloat16 are one table under two names; keep bf16",
            "precision.parameters",
            ledger.where("bf16", "bfloat16"),
            works=("bf16",),
        )
    old_name = "bfloat16" if ledger.keys_of("bfloat16") else "bf16"
    on = {
        "fp16": _enabled(ledger, "fp16", "fp16", around),
        "bf16": _enabled(ledger, old_name, "bf16", around),
    }
    if all(on.values()):
        ledger.conflict(
            f"fp16.enabled and {old_name}.enabled are both true",
            "precision.parameters",
            ledger.where("fp16.enabled", f"{old_name}.enabled"),
            works=("fp16.enabled = false", f"{old_name}.enabled = false"),
        )
        return "fp32"
    half = next((dtype for dtype, enabled in on.items() if enabled), None)
    key = {"fp16": "fp16.enabled", "bf16": f"{old_name}.enabled", None: "fp16, bf16"}[half]
    dtype = half or "fp32"
    source = "" if ledger.has(key) else "neither fp16 nor bf16 is on"
    ledger.set(key, "precision.parameters", dtype, "in forward and backward", source=source)
    gradients = _read_gradients(ledger, key, dtype, source)
    ledger.set(key, "precision.master", "fp32", "what the optimizer updates", source=source)
    _read_fp16(ledger, on=half == "fp16")
    _read_bf16(ledger, old_name)
    return gradients


def _enabled(ledger: Ledger, table: str, dtype: str, around: Surroundings) -> bool:
    key = f"{table}.enabled"
    if ledger.is_auto(key):
        on = around.parameters == dtype
        ledger.skip(key, f"precision.parameters of what the run builds on: {around.parameters}")
        return on
    on = ledger.flag(key, setting="precision.parameters")
    if on is False:
        ledger.skip(key, "off")
    return bool(on)


def _read_gradients(ledger: Ledger, enabled: str, dtype: str, source: str) -> str:
    roles = (
        ("data_types.grad_accum_dtype", "precision.gradients", "as they accumulate"),
        ("communication_data_type", "precision.reduction", "as they are summed over ranks"),
    )
    found: list[str] = []
    for key, setting, why in roles:
        told = ledger.word(key, DTYPES, setting=setting)
        if told is None:
            reason = f"{why}: as the parameters, unless {key} says more"
            ledger.set(enabled, setting, dtype, reason, source=source)
        else:
            ledger.set(key, setting, told, why)
        found.append(told or dtype)
    return found[0]


def _read_fp16(ledger: Ledger, *, on: bool) -> None:
    for name, why in FP16_NOT_NEEDED.items():
        if ledger.flag(f"fp16.{name}") is not None:
            ledger.skip(f"fp16.{name}", why)
    ledger.only(
        "fp16.fp16_master_weights_and_grads",
        (False,),
        "the optimizer keeps its state and its copy of the parameters in fp32",
        setting="precision.master",
    )
    _read_scale(ledger, on=on)


def _read_bf16(ledger: Ledger, table: str) -> None:
    for name, why in BF16_NOT_NEEDED.items():
        if ledger.flag(f"{table}.{name}") is not None:
            ledger.skip(f"{table}.{name}", why)
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        ledger.only(
            f"{table}.{name}",
            (False,),
            "the optimizer keeps its state and its copy of the parameters in one dtype, fp32; "
            'precision.master = "bf16" makes it bf16 for both',
            setting="precision.master",
        )


def _read_scale(ledger: Ledger, *, on: bool) -> None:
    """Map the loss scale: 0 follows the overflows, any other is fixed."""
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis")
    keys = [f"fp16.{name}" for name in (*names, "min_loss_scale", "consecutive_hysteresis")]
    if not on:
        for key in keys:
            ledger.skip(key, "fp16 is off")
        return
    scale_key, power_key, window_key, hysteresis_key, least_key, consecutive_key = keys
    scale = ledger.number(scale_key, NUMBER, setting="precision.loss_scale")
    if scale:
        ledger.set(scale_key, "precision.loss_scaling", "fixed", "0 would let it follow overflows")
        ledger.set(scale_key, "precision.loss_scale", scale, "factor of the loss")
        for key in keys[1:]:
            ledger.skip(key, "the scale is fixed")
        return
    default = "" if ledger.has(scale_key) else ledger.default
    ledger.set(
        scale_key, "precision.loss_scaling", "dynamic", "0 follows the overflows", source=default
    )
    power = ledger.whole(power_key, SCALE_POWER, setting="precision.loss_scale")
    source = ledger.default if power is None else ""
    power = 16 if power is None else power
    ledger.set(power_key, "precision.loss_scale", 2.0**power, f"2^{power}", source=source)
    window = _dynamic(ledger, window_key, COUNT, 1000)
    _set_dynamic(ledger, window_key, "loss_scale_window", window, "steps until it doubles")
    patience = _dynamic(ledger, hysteresis_key, COUNT, 2)
    why = "overflows until it halves"
    _set_dynamic(ledger, hysteresis_key, "loss_scale_hysteresis", patience, why)
    least = _dynamic(ledger, least_key, FROM_ZERO, 1) or 1
    _set_dynamic(ledger, least_key, "loss_scale_min", float(least), "it never falls below")
    refilled = (False, True) if patience == 1 else (False,)
    why = "overflows are counted since the scale last grew"
    ledger.only(consecutive_key, refilled, why)


def _dynamic(ledger: Ledger, key: str, kind: Integer, default: int) -> int:
    value = ledger.whole(key, kind)
    return default if value is None else value


def _set_dynamic(ledger: Ledger, key: str, name: str, value: object, why: str) -> None:
    source = "" if ledger.has(key) else ledger.default
    ledger.set(key, f"precision.{name}", value, why, source=source)
