# SPDX-License-Identifier: Apache-2.0
"""The numbers of a Megatron-LM command, and the course of its run.

Numbers are precision, loss scale, optimizer and learning rate; the course is what backward computes
again, what is said, saved and read.
"""

from __future__ import annotations

from echelon.core.choices.optimizers import OPTIMIZERS, PLAIN_OPTIMIZER
from echelon.core.plan import DTYPE_BYTES
from echelon.core.settings.value_types import Choice
from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import BETA, COUNT, FRACTION, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.megatron.abilities import NAMES, RATE_SCHEDULES
from echelon.interop.ranks import set_dtypes

SAMPLES = "how many samples a step has is not known"
STYLES = by_word(RATE_SCHEDULES)
_KINDS = by_word(NAMES.optimizers) | {
    f"dist_{word}": kind
    for kind, word in NAMES.optimizers.items()
    if OPTIMIZERS[kind].needs_whole_matrices
}
_OF_OPTIMIZER = "of the optimizer"
_MUON_ONLY = {
    "--muon-scale-mode": (("spectral",), "spectral", "a step is as large as sqrt(longer side)"),
    "--muon-extra-scale-factor": ((0.2,), 1.0, "times 0.2, so that AdamW's learning rate holds"),
    "--muon-use-nesterov": ((True,), False, "the momentum is Nesterov's"),
}


def read_precision(reader: KeyReader) -> int:
    """Map the dtypes of all roles; return the bytes of a gradient as it accumulates."""
    on = {dtype: bool(reader.flag(f"--{dtype}")) for dtype in ("fp16", "bf16")}
    if all(on.values()):
        reader.conflict(
            "--fp16 and --bf16", "precision.parameters", reader.where(*map("--{}".format, on))
        )
        return 4
    half = next((dtype for dtype, is_on in on.items() if is_on), None)
    key = f"--{half or 'bf16'}"
    wide = (
        half is None or half == "bf16" or bool(reader.flag("--accumulate-allreduce-grads-in-fp32"))
    )
    gradients = "fp32" if wide else "fp16"
    reduced = "--grad-reduce-in-bf16"
    if reader.flag(reduced, setting="precision.reduction"):
        if half == "bf16":
            gradients = "bf16"
            reader.skip(reduced, "gradients are bf16 and are summed over ranks as they are")
        else:
            reader.refuse(reduced, "it belongs to --bf16", setting="precision.reduction")
    set_dtypes(reader, key, half or "fp32", gradients, gradients, "fp32")
    _read_scale(reader, on=half == "fp16")
    return DTYPE_BYTES[gradients]


def _read_scale(reader: KeyReader, *, on: bool) -> None:
    fixed, first, least = "--loss-scale", "--initial-loss-scale", "--min-loss-scale"
    window, hysteresis = "--loss-scale-window", "--hysteresis"
    if not on:
        reader.skip_all((fixed, first, least, window, hysteresis), "only fp16 has a loss scale")
        return
    scale = reader.number(fixed, POSITIVE, setting="precision.loss_scale")
    if scale is not None:
        reader.set(fixed, "precision.loss_scaling", "fixed", "the scale does not change")
        reader.set(fixed, "precision.loss_scale", scale, "factor of the loss")
        reader.skip_all((first, least, window, hysteresis), "the scale is fixed")
        return
    reader.set(fixed, "precision.loss_scaling", "dynamic", "no fixed scale", source=reader.default)
    for key, name, kind, default in (
        (first, "loss_scale", POSITIVE, 2.0**32),
        (least, "loss_scale_min", POSITIVE, 1.0),
        (window, "loss_scale_window", COUNT, 1000),
        (hysteresis, "loss_scale_hysteresis", COUNT, 2),
    ):
        reader.take(key, f"precision.{name}", kind, "of the dynamic scale", default=default)


def read_optimizer(reader: KeyReader, tp: int) -> None:
    """Map the optimizer, and what it is given."""
    key = "--optimizer"
    why = "Adam's weight decay is decoupled"
    found = reader.take(key, "optimizer.kind", _KINDS, why, default=PLAIN_OPTIMIZER)
    kind = found or PLAIN_OPTIMIZER
    adam = (
        ("--adam-beta1", "beta1", BETA, 0.9),
        ("--adam-beta2", "beta2", BETA, 0.999),
        ("--adam-eps", "eps", POSITIVE, 1e-8),
    )
    sgd = (("--sgd-momentum", "momentum", BETA, 0.9),)
    muon = (
        ("--muon-momentum", "momentum", BETA, 0.9),
        ("--muon-num-ns-steps", "newton_schulz_steps", COUNT, 5),
    )
    own = OPTIMIZERS[kind].settings
    of_momentum = muon if OPTIMIZERS[kind].needs_whole_matrices else sgd
    used = [item for item in (*adam, *of_momentum) if item[1] in own]
    for flag, setting, number, default in used:
        reader.take(flag, f"optimizer.{setting}", number, _OF_OPTIMIZER, default=default)
    for flag, *_ in (*adam, *sgd, *muon):
        if flag not in [item[0] for item in used]:
            reader.skip(flag, f"{kind} does not use it")
    _read_muon(reader, kind, tp)
    decay = "optimizer.weight_decay"
    reader.take("--weight-decay", decay, NUMBER, _OF_OPTIMIZER, default=0.01)
    key = "--clip-grad"
    clip = reader.number(key, setting="optimizer.clip_norm")
    limit = 1.0 if clip is None else clip
    reader.set_or_default(key, "optimizer.clip_norm", limit or "none", "largest norm")


def _read_muon(reader: KeyReader, kind: str, tp: int) -> None:
    keys = (*_MUON_ONLY, "--muon-tp-mode", "--muon-fp32-matmul-prec", "--muon-no-split-qkv")
    if not OPTIMIZERS[kind].needs_whole_matrices:
        reader.skip_all(keys, f"{kind} does not use it")
        return
    for key, (allowed, default, why) in _MUON_ONLY.items():
        if reader.has(key) or default not in allowed:
            _require(reader, key, allowed, why, "optimizer.kind")
    whole = ("duplicated", "distributed") if tp > 1 else ("blockwise", "duplicated", "distributed")
    if tp > 1 and not reader.has(keys[3]):
        why = "a matrix is made orthogonal as a whole, whatever tensor ranks hold of it"
        reader.refuse(keys[3], why, suggestions=[f"{keys[3]} {mode}" for mode in whole])
    reader.only(keys[3], whole, "a matrix is made orthogonal as a whole")
    reader.skip(keys[4], "Newton-Schulz is in fp32 or wider")
    if reader.has(keys[5]):
        reader.refuse(keys[5], "q, k and v are three matrices", setting="optimizer.kind")


def read_learning_rate(reader: KeyReader, steps: int | None, batch: int | None) -> None:
    """Map the schedule: `steps` of the run, and `batch` for what is counted in samples."""
    peak = reader.take("--lr", "optimizer.learning_rate", POSITIVE, "at its peak")
    key = "--lr-decay-style"
    word = None
    if reader.has(key) and reader.given[key] == "inverse-square-root":
        reader.refuse(
            key, "there is no such schedule", suggestions=STYLES, setting="optimizer.schedule"
        )
    else:
        why = "after the warm-up"
        word = reader.take(key, "optimizer.schedule", STYLES, why, default="linear")
    style = word or "linear"
    key = "--min-lr"
    least = reader.number(key, setting="optimizer.final_ratio")
    if style == "constant" or peak is None:
        reader.skip(key, "a constant learning rate ends where it is")
    else:
        why = "last / peak learning rate"
        reader.set_or_default(key, "optimizer.final_ratio", (least or 0.0) / peak, why)
    _read_spans(reader, style, steps, batch)


def _read_spans(reader: KeyReader, style: str, steps: int | None, batch: int | None) -> None:
    """Map how long the rate rises and falls; it falls to the end of the run, never beyond."""
    decay = _counted(reader, "--lr-decay", "train.steps", batch)
    if decay is not None and steps is not None and decay[1] != steps:
        reader.refuse(decay[0], f"the schedule ends with the run, at step {steps}")
    elif decay is not None:
        reader.skip(decay[0], "the schedule ends with the run")
    setting, fraction = "optimizer.warmup_steps", "--lr-warmup-fraction"
    warmup = _counted(reader, "--lr-warmup", setting, batch)
    part = reader.number(fraction, FRACTION, setting=setting)
    if warmup is not None:
        reader.set(warmup[0], setting, warmup[1], "steps of linear rise")
    elif part is not None and steps is not None:
        reader.set(fraction, setting, round(part * steps), f"{part} of {steps} steps")
    elif part is not None:
        reader.refuse(fraction, "of how many steps is not known", suggestions=("--train-iters N",))
    else:
        reader.set("--lr-warmup-iters", setting, 0, "no warm-up", source=reader.default)
    wsd = _counted(reader, "--lr-wsd-decay", "optimizer.decay_steps", batch)
    shape = "--lr-wsd-decay-style"
    if style != "wsd":
        reader.skip_all((*([wsd[0]] if wsd else []), shape), "it is about --lr-decay-style WSD")
        return
    if wsd is not None:
        reader.set(wsd[0], "optimizer.decay_steps", wsd[1], "steps of the fall at the end")
    _require(reader, shape, ("linear",), "the fall of WSD is linear", "optimizer.decay_steps")


def _require(
    reader: KeyReader, flag: str, allowed: tuple[object, ...], why: str, setting: str
) -> None:
    """Accept these values of a flag whose default is another: it must be there."""
    if reader.has(flag):
        reader.only(flag, allowed, why, setting=setting)
    else:
        instead = [f"{flag} {value}" for value in allowed]
        reader.refuse(flag, why, suggestions=instead, setting=setting)


def _counted(
    reader: KeyReader, stem: str, setting: str, batch: int | None
) -> tuple[str, int] | None:
    """Return the flag that gives a span, and its steps: counted in steps or in samples."""
    iters, samples = f"{stem}-iters", f"{stem}-samples"
    count = reader.integer(iters, FROM_ZERO, setting=setting)
    given = reader.integer(samples, FROM_ZERO, setting=setting)
    if count is not None:
        reader.skip(samples, f"{iters} says it")
        return iters, count
    if given is not None and batch is None:
        reader.refuse(samples, SAMPLES, suggestions=("--global-batch-size N",), setting=setting)
    elif given is not None and batch:
        return samples, given // batch
    return None


def read_recompute(reader: KeyReader, layers: int | None, context: ImportContext) -> None:
    """Map which blocks are redone in backward: all of them, their attention, or none."""
    short, key = "--recompute-activations", "--recompute-granularity"
    method_key, count_key = "--recompute-method", "--recompute-num-layers"
    setting = "recompute.policy"
    if reader.flag(short, setting=setting):
        reader.set(short, setting, "selective", "attention is redone")
        reader.set(short, "recompute.operators", ["attention"], "attention is redone")
    policy = reader.take(key, setting, Choice(options=("full", "selective")), "what is redone")
    if policy == "selective":
        reader.set(key, "recompute.operators", ["attention"], "selective is the attention")
    modules = (["core_attn"], "core_attn")
    reader.only("--recompute-modules", modules, "selective is the attention", setting=setting)
    method = reader.word(method_key, ("uniform", "block"), setting="recompute.every")
    count = reader.integer(count_key, COUNT, setting="recompute.every")
    if policy != "full" or method is None:
        reader.skip_all((method_key, count_key), f"it is about {key} full")
        return
    stage = -(-layers // context.degrees["pp"]) if layers else 0
    every_block = count in (None, 1) if method == "uniform" else (count or 0) >= stage > 0
    if every_block:
        reader.set(method_key, "recompute.every", 1, "every block, each from its own input")
        reader.skip(count_key, "every block, each from its own input")
        return
    why = "a block is redone from its own input, and recompute.every counts from the first block"
    reader.refuse(count_key, why, suggestions=(f"{method_key} uniform {count_key} 1",))


def read_run(reader: KeyReader, context: ImportContext) -> None:
    """Map how often a run says, saves and validates, and what it reads."""
    for key, setting, why in (
        ("--log-interval", "observe.log_every", "steps between step lines"),
        ("--save-interval", "checkpoint.every", "steps between checkpoints"),
        ("--eval-interval", "train.validate_every", "steps between validations"),
        ("--eval-iters", "train.validation_batches", "global batches of a validation"),
        ("--seed", "train.seed", "of first weights and sample order"),
    ):
        value = reader.integer(key, FROM_ZERO, setting=setting)
        if value is None:
            continue
        if key == "--eval-iters" and (value == 0 or not reader.has("--eval-interval")):
            reader.skip(key, "no validation without both an interval and batches")
        elif key == "--eval-interval" and reader.given.get("--eval-iters") == 0:
            reader.skip(key, "--eval-iters is 0")
        else:
            reader.set(key, setting, value, why)
    for key in ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"):
        if "data.source" in context.keys_set:
            reader.skip(key, "data.source says what is read")
        elif reader.has(key):
            reader.skip(key, "the .bin and .idx files of Megatron-LM are not read")
            reader.assume(f"data.source, because {key} is not read; --set data.source=PATH")
    for key in ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"):
        reader.skip(key, "data.tokenizer says it; prepared data has its own")
    key, saved = "--load", reader.given.get("--save")
    if reader.has(key) and reader.given[key] == saved:
        reader.skip(key, "as --save: echelon train --resume goes on with a run")
    elif reader.has(key):
        reader.refuse(key, "--set train.weights=FOLDER begins with it")
