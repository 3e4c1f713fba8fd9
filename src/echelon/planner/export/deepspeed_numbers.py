"""The tables of a DeepSpeed JSON that change numbers: precision, optimizer, scheduler."""

from __future__ import annotations

from math import log2

from echelon.core.plan import Optimizer, Plan, Precision

TYPES = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}


def number_keys(plan: Plan) -> dict[str, object]:
    """Return the keys of a plan that change numbers, but for its batch."""
    numbers = plan.mathematics
    keys: dict[str, object] = {"gradient_clipping": numbers.optimizer.clip_norm or 0.0}
    keys |= _precision_keys(numbers.precision)
    return keys | _optimizer_keys(numbers.optimizer) | _scheduler_keys(numbers.optimizer)


def _precision_keys(precision: Precision) -> dict[str, object]:
    half = precision.parameters
    keys: dict[str, object] = {}
    if half in ("bf16", "fp16"):
        keys[f"{half}.enabled"] = True
    if precision.gradients != half:
        keys["data_types.grad_accum_dtype"] = precision.gradients
    if precision.reduction != half:
        keys["communication_data_type"] = precision.reduction
    if half != "fp16":
        return keys
    if precision.loss_scaling == "fixed":
        return keys | {"fp16.loss_scale": precision.loss_scale}
    power = log2(precision.loss_scale)
    return keys | {
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": int(power),
        "fp16.loss_scale_window": precision.loss_scale_window,
        "fp16.hysteresis": precision.loss_scale_hysteresis,
        "fp16.min_loss_scale": int(precision.loss_scale_min),
    }


def _optimizer_keys(optimizer: Optimizer) -> dict[str, object]:
    keys: dict[str, object] = {
        "type": TYPES[optimizer.kind],
        "params.lr": optimizer.learning_rate,
        "params.weight_decay": optimizer.weight_decay,
    }
    if optimizer.kind == "sgd":
        keys["params.momentum"] = optimizer.momentum
    else:
        keys["params.betas"] = [optimizer.beta1, optimizer.beta2]
        keys["params.eps"] = optimizer.eps
    return {f"optimizer.{name}": value for name, value in keys.items()}


def _scheduler_keys(optimizer: Optimizer) -> dict[str, object]:
    name = SCHEDULERS.get(optimizer.schedule)
    if name is None:
        return {}
    keys: dict[str, object] = {
        "type": name,
        "params.warmup_num_steps": optimizer.warmup_steps,
        "params.warmup_type": "linear",
    }
    if optimizer.schedule == "cosine":
        keys["params.warmup_min_ratio"] = 0.0
        keys["params.cos_min_ratio"] = optimizer.final_ratio
    else:
        keys["params.warmup_min_lr"] = 0.0
        keys["params.warmup_max_lr"] = optimizer.learning_rate
    if optimizer.schedule != "constant":
        keys["params.total_num_steps"] = optimizer.total_steps
    return {f"scheduler.{name}": value for name, value in keys.items()}
