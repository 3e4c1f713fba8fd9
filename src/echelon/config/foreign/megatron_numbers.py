"""The numbers of a Megatron-LM command: precision, loss scale, optimizer, learning rate."""

from __future__ import annotations

from echelon.config.foreign.ledger import COUNT, FROM_ZERO, NUMBER, POSITIVE, Ledger
from echelon.config.kinds import Real
from echelon.core.plan import DTYPE_BYTES

BETA = Real(below=True, maximum=1.0)
FRACTION = Real(maximum=1.0)
SAMPLES = "how many samples a step has is not known"
STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
MUON_ONLY = {
    "--muon-scale-mode": (("spectral",), "spectral", "a step is as large as sqrt(longer side)"),
    "--muon-extra-scale-factor": ((0.2,), 1.0, "times 0.2, so that AdamW's learning rate holds"),
    "--muon-use-nesterov": ((True,), False, "the momentum is Nesterov's"),
}


def read_precision(ledger: Ledger) -> int:
    """Map the dtypes of all roles; return the bytes of a gradient as it accumulates."""
    on = {dtype: bool(ledger.flag(f"--{dtype}")) for dtype in ("fp16", "bf16")}
    if all(on.values()):
        ledger.conflict(
            "--fp16 and --bf16", "precision.parameters", ledger.where(*map("--{}".format, on))
        )
        return 4
    half = next((dtype for dtype, is_on in on.items() if is_on), None)
    key = f"--{half or 'bf16'}"
    dtype, source = half or "fp32", "" if half else ledger.default
    wide = (
        half is None or half == "bf16" or bool(ledger.flag("--accumulate-allreduce-grads-in-fp32"))
    )
    gradients = "fp32" if wide else "fp16"
    reduced = "--grad-reduce-in-bf16"
    if ledger.flag(reduced, setting="precision.reduction"):
        if half == "bf16":
            gradients = "bf16"
            ledger.skip(reduced, "gradients are bf16 and are summed over ranks as they are")
        else:
            ledger.refuse(reduced, "it belongs to --bf16", setting="precision.reduction")
    for role, value, why in (
        ("parameters", dtype, "in forward and backward"),
        ("gradients", gradients, "as they accumulate"),
        ("reduction", gradients, "as they are summed over ranks"),
        ("master", "fp32", "what the optimizer updates"),
    ):
        ledger.set(key, f"precision.{role}", value, why, source=source)
    _read_scale(ledger, on=half == "fp16")
    return DTYPE_BYTES[gradients]


def _read_scale(ledger: Ledger, *, on: bool) -> None:
    fixed, first, least = "--loss-scale", "--initial-loss-scale", "--min-loss-scale"
    window, hysteresis = "--loss-scale-window", "--hysteresis"
    if not on:
        for key in (fixed, first, least, window, hysteresis):
            ledger.skip(key, "only fp16 has a loss scale")
        return
    scale = ledger.number(fixed, POSITIVE, setting="precision.loss_scale")
    if scale is not None:
        ledger.set(fixed, "precision.loss_scaling", "fixed", "the scale does not change")
        ledger.set(fixed, "precision.loss_scale", scale, "factor of the loss")
        for key in (first, least, window, hysteresis):
            ledger.skip(key, "the scale is fixed")
        return
    ledger.set(fixed, "precision.loss_scaling", "dynamic", "no fixed scale", source=ledger.default)
    for key, name, kind, default in (
        (first, "loss_scale", POSITIVE, 2.0**32),
        (least, "loss_scale_min", POSITIVE, 1.0),
        (window, "loss_scale_window", COUNT, 1000),
        (hysteresis, "loss_scale_hysteresis", COUNT, 2),
    ):
        value = ledger.read(key, kind, setting=f"precision.{name}")
        source = "" if ledger.has(key) else ledger.default
        value = default if value is None else value
        ledger.set(key, f"precision.{name}", value, "of the dynamic scale", source=source)


def read_optimizer(ledger: Ledger, tp: int) -> None:
    """Map the optimizer, and what it is given."""
    key = "--optimizer"
    name = ledger.word(key, OPTIMIZERS, setting="optimizer.kind")
    kind = OPTIMIZERS[name or "adam"]
    source = "" if ledger.has(key) else ledger.default
    ledger.set(key, "optimizer.kind", kind, "Adam's weight decay is decoupled", source=source)
    moments = (("--adam-beta1", "beta1", BETA, 0.9), ("--adam-beta2", "beta2", BETA, 0.999))
    adam = (*moments, ("--adam-eps", "eps", POSITIVE, 1e-8))
    sgd = (("--sgd-momentum", "momentum", BETA, 0.9),)
    muon = (
        ("--muon-momentum", "momentum", BETA, 0.9),
        ("--muon-num-ns-steps", "newton_schulz_steps", COUNT, 5),
    )
    used = {"adamw": adam, "sgd": sgd, "muon": (*adam, *muon)}[kind]
    for flag, setting, number, default in used:
        _number(ledger, flag, setting, number, default)
    for flag, *_ in (*adam, *sgd, *muon):
        if flag not in [item[0] for item in used]:
            ledger.skip(flag, f"{kind} does not use it")
    _read_muon(ledger, kind, tp)
    _number(ledger, "--weight-decay", "weight_decay", NUMBER, 0.01)
    key = "--clip-grad"
    clip = ledger.number(key, setting="optimizer.clip_norm")
    source = "" if ledger.has(key) else ledger.default
    limit = 1.0 if clip is None else clip
    ledger.set(key, "optimizer.clip_norm", limit or "none", "largest norm", source=source)


def _number(ledger: Ledger, key: str, setting: str, kind: Real | object, default: float) -> None:
    value = ledger.read(key, kind, setting=f"optimizer.{setting}")  # type: ignore[arg-type]
    source = "" if ledger.has(key) else ledger.default
    value = default if value is None else value
    ledger.set(key, f"optimizer.{setting}", value, "of the optimizer", source=source)


def _read_muon(ledger: Ledger, kind: str, tp: int) -> None:
    keys = (*MUON_ONLY, "--muon-tp-mode", "--muon-fp32-matmul-prec", "--muon-no-split-qkv")
    if kind != "muon":
        for key in keys:
            ledger.skip(key, f"{kind} does not use it")
        return
    for key, (allowed, default, why) in MUON_ONLY.items():
        if ledger.has(key):
            ledger.only(key, allowed, why, setting="optimizer.kind")
        elif default not in allowed:
            works = [f"{key} {value}" for value in allowed]
            ledger.refuse(key, why, works=works, setting="optimizer.kind")
    whole = ("duplicated", "distributed") if tp > 1 else ("blockwise", "duplicated", "distributed")
    if tp > 1 and not ledger.has(keys[3]):
        why = "a matrix is made orthogonal as a whole, whatever tensor ranks hold of it"
        ledger.refuse(keys[3], why, works=[f"{keys[3]} {mode}" for mode in whole])
    ledger.only(keys[3], whole, "a matrix is made orthogonal as a whole")
    ledger.skip(keys[4], "Newton-Schulz is in fp32 or wider")
    if ledger.has(keys[5]):
        ledger.refuse(keys[5], "q, k and v are three matrices", setting="optimizer.kind")


def read_learning_rate(ledger: Ledger, steps: int | None, batch: int | None) -> None:
    """Map the schedule: `steps` of the run, and `batch` for what is counted in samples."""
    peak = ledger.number("--lr", POSITIVE, setting="optimizer.learning_rate")
    if peak is not None:
        ledger.set("--lr", "optimizer.learning_rate", peak, "at its peak")
    key = "--lr-decay-style"
    told = None
    if ledger.has(key) and ledger.given[key] == "inverse-square-root":
        ledger.refuse(key, "there is no such schedule", works=STYLES, setting="optimizer.schedule")
    else:
        told = ledger.word(key, STYLES, setting="optimizer.schedule")
    style, source = told or "linear", "" if ledger.has(key) else ledger.default
    if told or not ledger.has(key):
        ledger.set(key, "optimizer.schedule", STYLES[style], "after the warm-up", source=source)
    key = "--min-lr"
    least = ledger.number(key, setting="optimizer.final_ratio")
    if style == "constant" or peak is None:
        ledger.skip(key, "a constant learning rate ends where it is")
    else:
        why, source = "last / peak learning rate", "" if ledger.has(key) else ledger.default
        ledger.set(key, "optimizer.final_ratio", (least or 0.0) / peak, why, source=source)
    _read_spans(ledger, style, steps, batch)


def _read_spans(ledger: Ledger, style: str, steps: int | None, batch: int | None) -> None:
    """Map how long the rate rises and falls; it falls to the end of the run, never beyond."""
    decay = _counted(ledger, "--lr-decay", "train.steps", batch)
    if decay is not None and steps is not None and decay[1] != steps:
        ledger.refuse(decay[0], f"the schedule ends with the run, at step {steps}")
    elif decay is not None:
        ledger.skip(decay[0], "the schedule ends with the run")
    setting, fraction = "optimizer.warmup_steps", "--lr-warmup-fraction"
    warmup = _counted(ledger, "--lr-warmup", setting, batch)
    part = ledger.number(fraction, FRACTION, setting=setting)
    if warmup is not None:
        ledger.set(warmup[0], setting, warmup[1], "steps of linear rise")
    elif part is not None and steps is not None:
        ledger.set(fraction, setting, round(part * steps), f"{part} of {steps} steps")
    elif part is not None:
        ledger.refuse(fraction, "of how many steps is not known", works=("--train-iters N",))
    else:
        ledger.set("--lr-warmup-iters", setting, 0, "no warm-up", source=ledger.default)
    wsd = _counted(ledger, "--lr-wsd-decay", "optimizer.decay_steps", batch)
    shape = "--lr-wsd-decay-style"
    if style != "WSD":
        for key in (*([wsd[0]] if wsd else []), shape):
            ledger.skip(key, "it is about --lr-decay-style WSD")
        return
    if wsd is not None:
        ledger.set(wsd[0], "optimizer.decay_steps", wsd[1], "steps of the fall at the end")
    why = "the fall of WSD is linear"
    if ledger.has(shape):
        ledger.only(shape, ("linear",), why, setting="optimizer.decay_steps")
    else:
        ledger.refuse(shape, why, works=(f"{shape} linear",), setting="optimizer.decay_steps")


def _counted(ledger: Ledger, stem: str, setting: str, batch: int | None) -> tuple[str, int] | None:
    """Return the flag that gives a span, and its steps: counted in steps or in samples."""
    iters, samples = f"{stem}-iters", f"{stem}-samples"
    count = ledger.whole(iters, FROM_ZERO, setting=setting)
    given = ledger.whole(samples, FROM_ZERO, setting=setting)
    if count is not None:
        ledger.skip(samples, f"{iters} says it")
        return iters, count
    if given is not None and batch is None:
        ledger.refuse(samples, SAMPLES, works=("--global-batch-size N",), setting=setting)
    elif given is not None and batch:
        return samples, given // batch
    return None
