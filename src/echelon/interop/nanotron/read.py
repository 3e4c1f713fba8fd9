# SPDX-License-Identifier: Apache-2.0
"""A nanotron YAML -> settings. Keys are those of `src/nanotron/config` in 2025.

https://github.com/huggingface/nanotron. Its model is a Llama or a Qwen 2; its data ranks share out
optimizer state at zero_stage 1. Gradients are averaged, and the loss is a mean over tokens.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.interop.abilities import tool_tables
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.ranks import (
    FULL_OR_NONE,
    data_ranks_from_launcher,
    read_degrees,
    set_batch,
    set_data_mesh,
    set_dtypes,
    set_sequence_parallel,
)

TABLES = tool_tables("nanotron")
DP, EP = "parallelism.dp", "parallelism.expert_parallel_size"
DEGREES = {
    "tp": "parallelism.tp",
    "pp": "parallelism.pp",
    "cp": "parallelism.context_parallel_size",
}
BATCH = ("(batch)", "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica")
_SCHEDULES = {"linear": "linear", "cosine": "cosine"}
_RATE = "optimizer.learning_rate_scheduler"


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every key of a nanotron YAML."""
    reader.sections(TABLES.sections)
    context = context.with_degrees(**read_degrees(reader, DEGREES))
    _read_modes(reader, context)
    reader.judge(TABLES.keys["model"], "model.model_config.")
    _read_activation(reader)
    stage = reader.integer("optimizer.zero_stage", FROM_ZERO, setting="zero.stage") or 0
    reader.set_or_default("optimizer.zero_stage", "zero.stage", stage, "what data ranks share out")
    data = _read_data(reader, stage, context)
    values = [None, *(reader.integer(key, COUNT, setting="batch") for key in BATCH[1:])]
    set_batch(reader, BATCH, values, data, context.microbatch)
    if reader.has(BATCH[2]):
        reader.take_part(BATCH[2], "microbatches of a step: the global batch has them")
    _read_precision(reader)
    steps = reader.take("tokens.train_steps", "train.steps", COUNT, "optimizer steps")
    _read_rate(reader, steps)
    _read_validation(reader)
    reader.finish(TABLES.keys, "run", "optimizer")


def _read_modes(reader: KeyReader, context: ImportContext) -> None:
    key = "parallelism.tp_mode"
    word = reader.word(key, ("ALL_REDUCE", "REDUCE_SCATTER"), setting="mesh.sequence_parallel")
    set_sequence_parallel(reader, key, word == "REDUCE_SCATTER", context.degrees["tp"])
    key = "parallelism.pp_engine"
    schedules = {"1f1b": "1f1b", "afab": "gpipe"}
    if context.degrees["pp"] > 1:
        reader.take(key, "pipeline.schedule", schedules, "order of forward and backward")
    else:
        reader.skip(key, "there is one stage")
    if context.degrees["cp"] > 1:
        reader.set(DEGREES["cp"], "context.kind", "ring", "pieces of a sequence meet in a ring")
    key = "parallelism.recompute_layer"
    reader.take(key, "recompute.policy", FULL_OR_NONE, "whether blocks are redone")


def _read_activation(reader: KeyReader) -> None:
    """Map the MLP: the models of nanotron have a gate."""
    key = "model.model_config.hidden_act"
    if reader.only(key, ("silu", "swiglu"), "a gate has SiLU", setting="model.activation"):
        reader.set(key, "model.gated", True, "its models have a gate", source=reader.default)
    base = "model.model_config.is_llama_config"
    reader.set(base, "model.norm", "rmsnorm", "its models have RMS norms", source=reader.default)
    reader.set(base, "model.positions", "rope", "positions are rotary", source=reader.default)
    key = "model.model_config._use_doc_masking"
    if reader.flag(key, setting="batch.documents"):
        reader.set(key, "batch.documents", "separate", "attention stays inside each document")
    else:
        reader.skip(key, "attention goes through all of a sequence")
    step, size = "model.make_vocab_size_divisible_by", "model.model_config.vocab_size"
    multiple = reader.integer(step, COUNT, setting="model.vocab") or 1
    reader.take_part(step, "model.vocab is padded by it")
    if (plain := reader.integer(size, COUNT, setting="model.vocab")) is not None:
        reader.set(size, "model.vocab", -(-plain // multiple) * multiple, "token ids")


def _read_data(reader: KeyReader, stage: int, context: ImportContext) -> int:
    """Map the data ranks; experts are shared out among them."""
    count = reader.integer(DP, COUNT, setting="mesh.dp_replicate")
    ep = reader.take(EP, "mesh.ep", COUNT, "shares of the experts") or 1
    if count is not None:
        ranks = count * context.model_ranks
        if context.ranks not in (None, ranks):
            message = f"{DP} = {count} are {ranks} ranks, but --ranks {context.ranks}"
            reader.conflict(message, "mesh", f"{reader.where(DP)}, --ranks {context.ranks}")
        context = replace(context.with_degrees(ep=ep), ranks=ranks)
    data = data_ranks_from_launcher(reader, context)
    if data is None:
        return 1
    source = reader.where(DP) if count is not None else data.source
    key = DP if count is not None else data.key
    set_data_mesh(reader, stage, replace(data, source=source, key=key, shards=ep))
    return data.count


def _read_precision(reader: KeyReader) -> None:
    key, wide = "model.dtype", "optimizer.accumulate_grad_in_fp32"
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    word = reader.word(key, words, setting="precision.parameters")
    if word is None and reader.has(key):
        return
    half = words[word or "float32"]
    gradients = "fp32" if reader.flag(wide, setting="precision.gradients") else half
    reader.skip(wide, f"gradients accumulate and are summed in {gradients}")
    set_dtypes(reader, key, half, gradients, gradients, "fp32" if gradients == "fp32" else half)


def _read_rate(reader: KeyReader, steps: int | None) -> None:
    """Map the learning rate: a rise, a flat part where the fall starts later, and the fall."""
    peak_key, style, last = (
        f"{_RATE}.{name}" for name in ("learning_rate", "lr_decay_style", "min_decay_lr")
    )
    peak = reader.take(peak_key, "optimizer.learning_rate", POSITIVE, "at its peak")
    key = f"{_RATE}.lr_warmup_steps"
    rise = reader.take(key, "optimizer.warmup_steps", FROM_ZERO, "steps of the rise", default=0)
    reader.only(f"{_RATE}.lr_warmup_style", ("linear",), "the rise is linear")
    word = reader.word(style, (*_SCHEDULES, "1-sqrt"), setting="optimizer.schedule") or "linear"
    start_key, span_key = f"{_RATE}.lr_decay_starting_step", f"{_RATE}.lr_decay_steps"
    start = reader.integer(start_key, FROM_ZERO, setting="optimizer.decay_steps")
    start = (rise or 0) if start is None else start
    span = reader.integer(span_key, FROM_ZERO, setting="optimizer.decay_steps")
    flat = start > (rise or 0)
    if word == "1-sqrt":
        reader.refuse(style, "there is no such fall", suggestions=_SCHEDULES)
        word = "linear"
    elif flat and word != "linear":
        reader.refuse(style, "behind a flat part the fall is linear", suggestions=("linear",))
    if span is not None and steps is not None and start + span != steps:
        why = f"the fall ends with the run: {start} + {span} steps of {steps}"
        reader.refuse(span_key, why, setting="optimizer.decay_steps")
    else:
        reader.skip(span_key, "the fall ends with the run")
    reader.set_or_default(style, "optimizer.schedule", "wsd" if flat else word, "after the rise")
    if flat and steps is not None:
        reader.set(start_key, "optimizer.decay_steps", steps - start, "steps of the fall")
    least = reader.number(last, NUMBER, setting="optimizer.final_ratio")
    if peak is not None:
        ratio = 1.0 if least is None and not reader.has(last) else (least or 0.0) / peak
        reader.set_or_default(last, "optimizer.final_ratio", ratio, "last / peak learning rate")


def _read_validation(reader: KeyReader) -> None:
    """Map how often a run validates; -1 is never, and 0 batches are none."""
    every, batches = "tokens.val_check_interval", "tokens.limit_val_batches"
    if reader.given.get(every) in (None, -1) or reader.given.get(batches) in (None, 0):
        reader.skip_all((every, batches), "nothing is validated")
        return
    reader.take(every, "train.validate_every", COUNT, "steps between validations")
    reader.take(batches, "train.validation_batches", COUNT, "global batches of a validation")
