# SPDX-License-Identifier: Apache-2.0
"""What changes the numbers of a torchtitan run: batch, precision, optimizer, learning rate.

What its configuration does not say is written out as torchtitan has it.
"""

from __future__ import annotations

from math import isinf

from echelon.config.settings.value_types import Integer, Real
from echelon.core.choices.optimizers import PLAIN_OPTIMIZER
from echelon.interop.key_reader import BETA, COUNT, FRACTION, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.ranks import set_dtypes

LOCAL, OLD_LOCAL = "training.local_batch_size", "training.batch_size"
GLOBAL = "training.global_batch_size"
PIECE = "parallelism.pipeline_parallel_microbatch_size"
MICRO, TOTAL = "batch.microbatch_sequences", "batch.global_sequences"
STEPS = "training.steps"
_OR_LOCAL = Integer(minimum=-1)


def read_batch(reader: KeyReader, data: int, *, pp: int) -> None:
    """Map the batch: what a rank reads at once, cut for a pipeline into microbatches."""
    old = reader.has(OLD_LOCAL) and not reader.has(LOCAL)
    local_key = OLD_LOCAL if old else LOCAL
    local = reader.integer(local_key, COUNT, setting=MICRO) or (
        None if reader.has(local_key) else 8
    )
    if not old:
        reader.skip(OLD_LOCAL, f"{LOCAL} says it")
    total = reader.integer(GLOBAL, _OR_LOCAL, setting=TOTAL)
    piece = reader.integer(PIECE, COUNT, setting=MICRO) or 1
    key = "training.seq_len"
    reader.take(key, "batch.sequence_length", COUNT, "tokens of a sequence", default=2048)
    if local is None:
        return
    source = "" if reader.has(local_key) else reader.default
    if total is None or total < 1:
        why = f"{local} on each of {data} data ranks"
        total_source = reader.where(GLOBAL) if reader.has(GLOBAL) else source
        reader.set(GLOBAL, TOTAL, local * data, why, source=total_source or reader.where(local_key))
        total = local * data
    else:
        reader.set(GLOBAL, TOTAL, total, "sequences of one optimizer step")
    if pp == 1:
        why = "sequences of one forward pass of a rank"
        reader.set_or_default(local_key, MICRO, local, why)
        reader.skip(PIECE, "there is one stage")
    elif total != local * data:
        why = "the pipeline would drain between parts of a step, and here it does once"
        suggestions = (f"{LOCAL} = {total // data}",) if total % data == 0 else ()
        reader.refuse(GLOBAL, why, suggestions=suggestions, setting=TOTAL)
    else:
        why = "sequences of one forward pass of a rank"
        reader.set_or_default(PIECE, MICRO, piece, why)
        reader.skip(local_key, f"{local // piece} microbatches of {piece} on each data rank")


def read_precision(reader: KeyReader) -> None:
    """Map what is computed in: what rests, accumulates and is summed has fp32."""
    key = "training.mixed_precision_param"
    word = reader.word(key, ("bfloat16", "float32"), setting="precision.parameters")
    if word is None and reader.has(key):
        return
    parameters = "fp32" if word == "float32" else "bf16"
    set_dtypes(reader, key, parameters, "fp32", "fp32", "fp32")


def read_optimizer(reader: KeyReader) -> None:
    """Map the optimizer, its clipping and the seed."""
    key = "optimizer.name"
    if reader.only(key, ("AdamW",), "weight decay is decoupled", setting="optimizer.kind"):
        reader.set_or_default(key, "optimizer.kind", PLAIN_OPTIMIZER, "weight decay is decoupled")
    for key, setting, kind, default in (
        ("lr", "learning_rate", POSITIVE, 8e-4),
        ("beta1", "beta1", BETA, 0.9),
        ("beta2", "beta2", BETA, 0.95),
        ("eps", "eps", POSITIVE, 1e-8),
        ("weight_decay", "weight_decay", NUMBER, 0.1),
    ):
        _number(reader, f"optimizer.{key}", f"optimizer.{setting}", kind, default)
    decay = reader.given.get("optimizer.weight_decay", 0.1)
    if decay:
        why = "every parameter decays: torchtitan has one group of them"
        reader.set("optimizer.name", "optimizer.decay", "all", why, source=reader.default)
    key, setting = "training.max_norm", "optimizer.clip_norm"
    given = reader.given.get(key)
    if isinstance(given, float) and isinf(given):
        reader.set(key, setting, "none", "infinity is no limit")
        reader.known[key] = None
    else:
        _number(reader, key, setting, POSITIVE, 1.0)
    for key in ("training.seed", "debug.seed"):
        reader.take(key, "train.seed", FROM_ZERO, "of first weights and sample order")


def read_learning_rate(reader: KeyReader) -> None:
    """Map the schedule: a linear rise, a flat part where there is a ratio, a fall to the end."""
    steps = reader.take(STEPS, "train.steps", COUNT, "optimizer steps", default=10_000)
    table = "lr_scheduler"
    end = f"{table}.total_steps"
    if reader.integer(end, COUNT, setting="train.steps") == steps:
        reader.skip(end, "the schedule ends with the run")
    elif reader.has(end):
        reader.refuse(end, f"the schedule ends with the run, at step {steps}")
    _number(reader, f"{table}.warmup_steps", "optimizer.warmup_steps", FROM_ZERO, 200)
    kind_key, ratio_key = f"{table}.decay_type", f"{table}.decay_ratio"
    kind = reader.word(kind_key, ("linear", "cosine", "sqrt"), setting="optimizer.schedule")
    ratio = reader.number(ratio_key, FRACTION, setting="optimizer.decay_steps")
    least_key = _least_key(reader)
    least = reader.number(least_key, FRACTION, setting="optimizer.final_ratio")
    if kind == "sqrt":
        reader.refuse(kind_key, "there is no such fall", suggestions=('"linear"', '"cosine"'))
        return
    if ratio == 0:
        reader.set(ratio_key, "optimizer.schedule", "constant", "no part of the run falls")
        reader.skip_all((kind_key, least_key), "nothing falls")
        return
    if ratio is not None and kind == "cosine":
        reader.refuse(
            kind_key, f"with {ratio_key} the fall is linear here", suggestions=('"linear"',)
        )
        return
    shape = "wsd" if ratio is not None else kind or "linear"
    reader.set_or_default(kind_key, "optimizer.schedule", shape, "after the warm-up")
    if ratio is not None and steps:
        fall = round(steps * ratio)
        reader.set(ratio_key, "optimizer.decay_steps", fall, f"{ratio} of {steps} steps")
    why = "last / peak learning rate"
    reader.set_or_default(least_key, "optimizer.final_ratio", least or 0.0, why)


def _least_key(reader: KeyReader) -> str:
    """Return the key of the last learning rate: it had another name once."""
    new, old = "lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"
    if reader.has(old) and not reader.has(new):
        return old
    reader.skip(old, f"{new} says it")
    return new


def _number(
    reader: KeyReader, key: str, setting: str, kind: Real | Integer, default: float
) -> None:
    reader.take(key, setting, kind, "as torchtitan has it", default=default)
