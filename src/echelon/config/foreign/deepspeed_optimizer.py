"""The optimizer and the scheduler of a DeepSpeed JSON; without them the run's own hold."""

from __future__ import annotations

from typing import cast

from echelon.config.foreign.ledger import COUNT, FROM_ZERO, NUMBER, POSITIVE, Ledger
from echelon.config.kinds import Real, Text
from echelon.core.rulebook.config import WRONG_TYPE

KIND = "optimizer.type"
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
OF_BASE = "that of what the run builds on"
BETA = Real(below=True, maximum=1.0)

REFUSED_OPTIMIZERS = {
    "adagrad": "there is no Adagrad",
    "lamb": "there is no LAMB",
    "lion": "there is no Lion",
    "muadam": "learning rates are not scaled by width",
    "muadamw": "learning rates are not scaled by width",
    "musgd": "learning rates are not scaled by width",
    "muon": (
        "DeepSpeed scales the step of a matrix by sqrt(max(1, rows / columns)), and here it is 0.2 "
        'sqrt(longer side), so no learning rate carries over; optimizer.kind = "muon" with one for '
        "AdamW"
    ),
    "onebitadam": "gradients are not compressed to one bit",
    "onebitlamb": "gradients are not compressed to one bit",
    "zerooneadam": "gradients are not compressed to one bit",
}
NOT_NEEDED = {
    "legacy_fusion": "one fused call per bucket",
    "params.foreach": "one fused call per bucket",
    "params.fused": "one fused call per bucket",
    "params.set_grad_none": "gradients live in flat buckets, and are set to zero",
    "params.torch_adam": "one fused call per bucket",
}
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "adam_w_mode": ((True,), "weight decay does not go through the moments of Adam"),
    "amsgrad": ((False,), "there is no AMSGrad"),
    "bias_correction": ((True,), "the moments of Adam are always corrected"),
    "dampening": ((0, 0.0), "momentum is not dampened"),
    "fp32_optimizer_states": ((True,), "optimizer state has precision.master, fp32"),
    "max_grad_norm": ((0, 0.0), "gradient_clipping says it"),
    "maximize": ((False,), "the loss is made small"),
    "nesterov": ((False,), "there is no Nesterov step in SGD"),
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
REFUSED_SCHEDULES = {
    "LRRangeTest": "the learning rate never rises through a run to find its limit",
    "OneCycle": "there is no cycle of rate and momentum",
}
WARMUP_STEPS = 1000  # DeepSpeed's default.


def read_optimizer(ledger: Ledger) -> None:
    """Map the optimizer; "auto" leaves a value to what the run builds on."""
    name = _type_of(ledger, "optimizer", "optimizer.kind")
    if name is None:
        return
    kind = OPTIMIZERS.get(name.lower())
    if kind is not None:
        why = "weight decay is decoupled in both" if kind == "adamw" else "as torch.optim.SGD"
        ledger.set(KIND, "optimizer.kind", kind, why)
    else:
        why = REFUSED_OPTIMIZERS.get(name.lower(), "there is no such optimizer")
        ledger.refuse(KIND, why, works=('"AdamW"', '"SGD"'), setting="optimizer.kind")
    _value(ledger, "lr", "learning_rate", POSITIVE, "at its peak")
    _read_moments(ledger, kind)
    _read_decay(ledger)
    for part, why in NOT_NEEDED.items():
        key = f"optimizer.{part}"
        if ledger.flag(key) is not None:
            ledger.skip(key, why)
    for part, (allowed, why) in ONLY.items():
        ledger.only(f"optimizer.params.{part}", allowed, why)
    for part in ("muon_lr", "adam_lr", "ns_method"):
        ledger.skip(f"optimizer.params.{part}", "it is about Muon")


def _type_of(ledger: Ledger, table: str, setting: str) -> str | None:
    """Return the type that a table names; None where there is no table, or none that counts."""
    key = f"{table}.type"
    given = [name for name in ledger.keys_of(table) if name != table and ledger.has(name)]
    if not given:
        return None
    name = ledger.read(key, Text(), setting=setting)
    if isinstance(name, str):
        return name
    if not ledger.has(key):
        why = f"DeepSpeed does without {table} then, whatever else it says"
        ledger.refuse(key, why, works=(f"no {table}",), setting=setting)
    ledger.know_table(table)
    return None


def _value(ledger: Ledger, name: str, setting: str, kind: Real, why: str) -> None:
    key, setting = f"optimizer.params.{name}", f"optimizer.{setting}"
    if ledger.is_auto(key):
        ledger.skip(key, OF_BASE)
    elif (value := ledger.number(key, kind, setting=setting)) is not None:
        ledger.set(key, setting, value, why)


def _read_moments(ledger: Ledger, kind: str | None) -> None:
    betas, eps, momentum = (f"optimizer.params.{name}" for name in ("betas", "eps", "momentum"))
    if kind == "sgd":
        for key in (betas, eps):
            ledger.skip(key, "SGD does not use it")
        if ledger.has(momentum):
            _value(ledger, "momentum", "momentum", BETA, "of the gradients")
        else:
            why = "torch.optim.SGD has none by default"
            ledger.set(momentum, "optimizer.momentum", 0.0, why, source=ledger.default)
        return
    ledger.skip(momentum, "Adam does not use it")
    _read_betas(ledger, betas)
    _value(ledger, "eps", "eps", POSITIVE, "added to the root of the second moment")


def _read_betas(ledger: Ledger, key: str) -> None:
    if ledger.is_auto(key):
        ledger.skip(key, OF_BASE)
        return
    if not ledger.has(key):
        for setting, value in (("beta1", 0.9), ("beta2", 0.999)):
            ledger.set(key, f"optimizer.{setting}", value, "default of Adam", source=ledger.default)
        return
    value = ledger.given[key]
    pair = cast("list[object]", value) if isinstance(value, list) else []
    if len(pair) != 2 or any(BETA.misfit(item) for item in pair):
        ledger.problems.append(
            WRONG_TYPE.problem(
                f"{key} = {ledger.text(key)} is not two numbers from 0 to below 1",
                key="optimizer.beta1",
                set_by=ledger.where(key),
                works=("[0.9, 0.999]",),
            )
        )
        return
    ledger.set(key, "optimizer.beta1", pair[0], "decay of the first moment")
    ledger.set(key, "optimizer.beta2", pair[1], "decay of the second moment")


def _read_decay(ledger: Ledger) -> None:
    key, setting = "optimizer.params.weight_decay", "optimizer.weight_decay"
    why = "of matrices, as Hugging Face groups parameters; optimizer.decay says which"
    if ledger.has(key):
        _value(ledger, "weight_decay", "weight_decay", NUMBER, why)
    else:
        ledger.set(key, setting, 0.0, "DeepSpeed has none by default", source=ledger.default)


def read_scheduler(ledger: Ledger) -> None:
    """Map the schedule of the learning rate: a linear warm-up, then one of three shapes."""
    name = _type_of(ledger, "scheduler", "optimizer.schedule")
    if name is None:
        return
    key, schedule = "scheduler.type", SCHEDULES.get(name)
    if schedule is not None:
        ledger.set(key, "optimizer.schedule", schedule, "after the warm-up")
    else:
        why = REFUSED_SCHEDULES.get(name, "there is no such schedule")
        ledger.refuse(key, why, works=map('"{}"'.format, SCHEDULES), setting="optimizer.schedule")
        ledger.know_table("scheduler")
        return
    _read_warmup(ledger)
    _read_peak(ledger, schedule)
    _read_end(ledger, schedule)
    ledger.only("scheduler.params.last_batch_iteration", (-1,), "a schedule starts with its run")


def _read_warmup(ledger: Ledger) -> None:
    prefix = "scheduler.params"
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        key = f"{prefix}.{name}"
        if ledger.is_auto(key):
            ledger.skip(key, "0: the warm-up starts there")
        else:
            ledger.only(key, (0, 0.0), "the warm-up starts at 0 (its first step is peak / steps)")
    key, setting = f"{prefix}.warmup_num_steps", "optimizer.warmup_steps"
    kind_key = f"{prefix}.warmup_type"
    if ledger.is_auto(key):
        ledger.skip(key, OF_BASE)
        ledger.only(kind_key, ("linear",), "the warm-up is linear", setting=setting)
        return
    steps = ledger.whole(key, FROM_ZERO, setting=setting)
    given = ledger.has(key)
    steps = WARMUP_STEPS if not given else steps
    if steps is None:
        return
    ledger.set(key, setting, steps, "linear rise", source="" if given else ledger.default)
    if ledger.has(kind_key):
        ledger.only(kind_key, ("linear",), "the warm-up is linear", setting=setting)
    elif steps > 1:
        why = "DeepSpeed's warm-up is logarithmic by default, and here it is linear"
        ledger.refuse(kind_key, why, works=(f'{kind_key} = "linear"',), setting=setting)


def _read_peak(ledger: Ledger, schedule: str) -> None:
    key, setting = "scheduler.params.warmup_max_lr", "optimizer.learning_rate"
    if schedule == "linear" and not ledger.has(key):
        # Not that of the optimizer: the two conflict where they differ.
        ledger.set(key, setting, 0.001, "default of WarmupDecayLR", source=ledger.default)
        return
    if ledger.is_auto(key):
        ledger.skip(key, OF_BASE)
    elif (peak := ledger.number(key, POSITIVE, setting=setting)) is not None:
        ledger.set(key, setting, peak, "at the end of the warm-up")


def _read_end(ledger: Ledger, schedule: str) -> None:
    key = "scheduler.params.total_num_steps"
    if ledger.is_auto(key):
        ledger.skip(key, "train.steps of what the run builds on")
    elif schedule == "constant":
        ledger.skip(key, "a constant learning rate has no end")
    elif (steps := ledger.whole(key, COUNT, setting="train.steps")) is not None:
        ledger.set(key, "train.steps", steps, "the schedule ends with the run")
    key, setting = "scheduler.params.cos_min_ratio", "optimizer.final_ratio"
    if schedule != "cosine":
        ledger.skip(key, "it is about WarmupCosineLR")
        if schedule == "linear":
            ledger.set("scheduler.type", setting, 0.0, "WarmupDecayLR falls to 0")
        return
    ratio = ledger.number(key, Real(maximum=1.0), setting=setting)
    if ratio is None and not ledger.has(key):
        ledger.set(key, setting, 0.0001, "default of WarmupCosineLR", source=ledger.default)
    elif ratio is not None:
        ledger.set(key, setting, ratio, "last / peak learning rate")
