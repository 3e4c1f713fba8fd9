"""What changes the numbers of a torchtitan run: batch, precision, optimizer, learning rate.

What its configuration does not say is written out as torchtitan has it.
"""

from __future__ import annotations

from math import isinf

from echelon.config.foreign.ledger import COUNT, FROM_ZERO, NUMBER, POSITIVE, Ledger
from echelon.config.kinds import Integer, Real

LOCAL, OLD_LOCAL = "training.local_batch_size", "training.batch_size"
GLOBAL = "training.global_batch_size"
PIECE = "parallelism.pipeline_parallel_microbatch_size"
MICRO, TOTAL = "batch.microbatch_sequences", "batch.global_sequences"
STEPS = "training.steps"
BETA = Real(below=True, maximum=1.0)
FRACTION = Real(maximum=1.0)
OR_LOCAL = Integer(minimum=-1)


def read_batch(ledger: Ledger, data: int, *, pp: int) -> None:
    """Map the batch: what a rank reads at once, cut for a pipeline into microbatches."""
    old = ledger.has(OLD_LOCAL) and not ledger.has(LOCAL)
    local_key = OLD_LOCAL if old else LOCAL
    local = ledger.whole(local_key, COUNT, setting=MICRO) or (None if ledger.has(local_key) else 8)
    if not old:
        ledger.skip(OLD_LOCAL, f"{LOCAL} says it")
    total = ledger.whole(GLOBAL, OR_LOCAL, setting=TOTAL)
    piece = ledger.whole(PIECE, COUNT, setting=MICRO) or 1
    _read_length(ledger)
    if local is None:
        return
    source = "" if ledger.has(local_key) else ledger.default
    if total is None or total < 1:
        why = f"{local} on each of {data} data ranks"
        total_source = ledger.where(GLOBAL) if ledger.has(GLOBAL) else source
        ledger.set(GLOBAL, TOTAL, local * data, why, source=total_source or ledger.where(local_key))
        total = local * data
    else:
        ledger.set(GLOBAL, TOTAL, total, "sequences of one optimizer step")
    if pp == 1:
        why = "sequences of one forward pass of a rank"
        ledger.set(local_key, MICRO, local, why, source=source)
        ledger.skip(PIECE, "there is one stage")
    elif total != local * data:
        why = "the pipeline would drain between parts of a step, and here it does once"
        works = (f"{LOCAL} = {total // data}",) if total % data == 0 else ()
        ledger.refuse(GLOBAL, why, works=works, setting=TOTAL)
    else:
        why = "sequences of one forward pass of a rank"
        piece_source = "" if ledger.has(PIECE) else ledger.default
        ledger.set(PIECE, MICRO, piece, why, source=piece_source)
        ledger.skip(local_key, f"{local // piece} microbatches of {piece} on each data rank")


def _read_length(ledger: Ledger) -> None:
    key = "training.seq_len"
    length = ledger.whole(key, COUNT, setting="batch.sequence_length")
    if length is not None or not ledger.has(key):
        source = "" if ledger.has(key) else ledger.default
        why = "tokens of a sequence"
        ledger.set(key, "batch.sequence_length", length or 2048, why, source=source)


def read_precision(ledger: Ledger) -> None:
    """Map what is computed in: what rests, accumulates and is summed has fp32."""
    key = "training.mixed_precision_param"
    word = ledger.word(key, ("bfloat16", "float32"), setting="precision.parameters")
    if word is None and ledger.has(key):
        return
    dtype, source = "fp32" if word == "float32" else "bf16", "" if word else ledger.default
    for role, value, why in (
        ("parameters", dtype, "in forward and backward"),
        ("gradients", "fp32", "as they accumulate"),
        ("reduction", "fp32", "as they are summed over ranks"),
        ("master", "fp32", "what the optimizer updates"),
    ):
        ledger.set(key, f"precision.{role}", value, why, source=source)


def read_optimizer(ledger: Ledger) -> None:
    """Map the optimizer, its clipping and the seed."""
    key = "optimizer.name"
    if ledger.only(key, ("AdamW",), "weight decay is decoupled", setting="optimizer.kind"):
        source = "" if ledger.has(key) else ledger.default
        ledger.set(key, "optimizer.kind", "adamw", "weight decay is decoupled", source=source)
    for key, setting, kind, default in (
        ("lr", "learning_rate", POSITIVE, 8e-4),
        ("beta1", "beta1", BETA, 0.9),
        ("beta2", "beta2", BETA, 0.95),
        ("eps", "eps", POSITIVE, 1e-8),
        ("weight_decay", "weight_decay", NUMBER, 0.1),
    ):
        _number(ledger, f"optimizer.{key}", f"optimizer.{setting}", kind, default)
    decay = ledger.given.get("optimizer.weight_decay", 0.1)
    if decay:
        why = "every parameter decays: torchtitan has one group of them"
        ledger.set("optimizer.name", "optimizer.decay", "all", why, source=ledger.default)
    key, setting = "training.max_norm", "optimizer.clip_norm"
    given = ledger.given.get(key)
    if isinstance(given, float) and isinf(given):
        ledger.set(key, setting, "none", "infinity is no limit")
        ledger.known[key] = None
    else:
        _number(ledger, key, setting, POSITIVE, 1.0)
    for key in ("training.seed", "debug.seed"):
        if (seed := ledger.whole(key, FROM_ZERO, setting="train.seed")) is not None:
            ledger.set(key, "train.seed", seed, "of first weights and sample order")


def read_learning_rate(ledger: Ledger) -> None:
    """Map the schedule: a linear rise, a flat part where there is a ratio, a fall to the end."""
    steps = ledger.whole(STEPS, COUNT, setting="train.steps")
    if steps is not None or not ledger.has(STEPS):
        source = "" if ledger.has(STEPS) else ledger.default
        steps = 10_000 if steps is None else steps
        ledger.set(STEPS, "train.steps", steps, "optimizer steps", source=source)
    table = "lr_scheduler"
    end = f"{table}.total_steps"
    if ledger.whole(end, COUNT, setting="train.steps") == steps:
        ledger.skip(end, "the schedule ends with the run")
    elif ledger.has(end):
        ledger.refuse(end, f"the schedule ends with the run, at step {steps}")
    _number(ledger, f"{table}.warmup_steps", "optimizer.warmup_steps", FROM_ZERO, 200)
    kind_key, ratio_key = f"{table}.decay_type", f"{table}.decay_ratio"
    kind = ledger.word(kind_key, ("linear", "cosine", "sqrt"), setting="optimizer.schedule")
    ratio = ledger.number(ratio_key, FRACTION, setting="optimizer.decay_steps")
    least_key = _least_key(ledger)
    least = ledger.number(least_key, FRACTION, setting="optimizer.final_ratio")
    if kind == "sqrt":
        ledger.refuse(kind_key, "there is no such fall", works=('"linear"', '"cosine"'))
        return
    if ratio == 0:
        ledger.set(ratio_key, "optimizer.schedule", "constant", "no part of the run falls")
        for key in (kind_key, least_key):
            ledger.skip(key, "nothing falls")
        return
    if ratio is not None and kind == "cosine":
        ledger.refuse(kind_key, f"with {ratio_key} the fall is linear here", works=('"linear"',))
        return
    shape = "wsd" if ratio is not None else kind or "linear"
    source = "" if ledger.has(kind_key) else ledger.default
    ledger.set(kind_key, "optimizer.schedule", shape, "after the warm-up", source=source)
    if ratio is not None and steps:
        fall = round(steps * ratio)
        ledger.set(ratio_key, "optimizer.decay_steps", fall, f"{ratio} of {steps} steps")
    source = "" if ledger.has(least_key) else ledger.default
    why = "last / peak learning rate"
    ledger.set(least_key, "optimizer.final_ratio", least or 0.0, why, source=source)


def _least_key(ledger: Ledger) -> str:
    """Return the key of the last learning rate: it had another name once."""
    new, old = "lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"
    if ledger.has(old) and not ledger.has(new):
        return old
    ledger.skip(old, f"{new} says it")
    return new


def _number(ledger: Ledger, key: str, setting: str, kind: Real | Integer, default: float) -> None:
    value = ledger.read(key, kind, setting=setting)
    if value is None and ledger.has(key):
        return
    source = "" if ledger.has(key) else ledger.default
    given = default if value is None else value
    ledger.set(key, setting, given, "as torchtitan has it", source=source)
