# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed JSON -> settings. Keys and defaults are those of DeepSpeed 0.19 and before.

https://www.deepspeed.ai/docs/config-json; "auto" as Hugging Face's integration resolves it.

The section names the modules of a model by patterns; here the model has its experts, and the run
builds on it. DeepSpeed 0.19.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.interop.deepspeed.abilities import EXCHANGE, TABLES
from echelon.interop.deepspeed.read_numbers import read_optimizer, read_precision, read_scheduler
from echelon.interop.deepspeed.read_zero import TABLE, read_activations, read_stage, read_zero
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FLAG, FROM_ZERO, POSITIVE, KeyReader
from echelon.interop.ranks import (
    DataRanks,
    data_ranks_from_launcher,
    read_count,
    read_expert_degrees,
    set_batch,
    set_data_mesh,
    shards_of_experts,
)

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MICS = "zero_optimization.mics_shard_size"


_PARTITIONS = {
    "uniform": ("even", "as many blocks on each stage"),
    "parameters": ("auto", "balanced by times, which grow with parameters"),
    "profile": ("auto", "balanced by times; pipeline.times has measured ones"),
    "best": ("auto", "balanced by times"),
    "auto": ("auto", "balanced by times"),
}
"""The ways of DeepSpeed's pipeline to cut layers into stages: what each is here, and why."""

EXPERTS = "expert_parallel"
_SWITCH = f"{EXPERTS}.enabled"


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every key of a DeepSpeed configuration."""
    old_form = isinstance(reader.given.get(TABLE), bool)
    reader.sections(name for name in TABLES.sections if not (old_form and name == TABLE))
    context = read_experts(reader, _read_model_degrees(reader, context))
    stage = read_stage(reader)
    gradients = read_precision(reader, context)
    data = _read_ranks_and_batch(reader, stage, context)
    read_zero(reader, stage, gradients, data, context)
    read_activations(reader)
    read_optimizer(reader)
    read_scheduler(reader)
    read_clipping(reader)
    read_rest(reader)
    reader.finish()


def _read_model_degrees(reader: KeyReader, context: ImportContext) -> ImportContext:
    degrees = dict(context.degrees)
    key = "tensor_parallel.autotp_size"
    if (tp := reader.integer(key, FROM_ZERO, setting="mesh.tp")) is not None and tp > 1:
        reader.set(key, "mesh.tp", tp, "pieces of a matrix")
        degrees["tp"] = tp
    else:
        reader.skip(key, "0 and 1 leave matrices whole")
    auto = "mesh.pp of what the run builds on"
    degrees["pp"] = (
        reader.take("pipeline.stages", "mesh.pp", COUNT, "pipeline stages", auto=auto)
        or degrees["pp"]
    )
    _read_partition(reader)
    key = "sequence_parallel_size"
    if (cp := reader.take(key, "mesh.cp", COUNT, "pieces of a sequence")) is not None:
        degrees["cp"] = cp
        if cp > 1:
            reader.set(key, "context.kind", EXCHANGE, "heads are exchanged for the sequence")
    return context.with_degrees(**degrees)


def _read_partition(reader: KeyReader) -> None:
    """Map how layers are cut into stages; what DeepSpeed weighs by parameters has a time here."""
    key, setting = "pipeline.partition", "pipeline.stages"
    given = reader.given.get(key)
    if isinstance(given, str) and given.startswith("type:") and reader.has(key):
        reader.set(key, setting, "auto", "blocks are of one type, and balanced by their times")
    elif (word := reader.word(key, _PARTITIONS, setting=setting)) is not None:
        reader.set(key, setting, *_PARTITIONS[word])


def _read_ranks_and_batch(reader: KeyReader, stage: int, context: ImportContext) -> int:
    settings = ("batch.global_sequences", "batch.microbatch_sequences", "batch.global_sequences")
    total, micro, steps = (
        read_count(reader, key, setting, "follows from the run and its ranks")
        for key, setting in zip(BATCH, settings, strict=True)
    )
    data = data_ranks_from_launcher(reader, context)
    if total and micro and steps:
        data = _data_ranks_from_batch(reader, (total, micro, steps), data, context)
    if data is None:
        return 1
    data = replace(data, shards=shards_of_experts(context))
    set_data_mesh(reader, stage, replace(data, groups=_groups(reader, stage, data.count)))
    set_batch(reader, BATCH, (total, micro, steps), data.count, context.microbatch)
    if steps:
        reader.take_part(
            BATCH[2], "follows: global_sequences / (microbatch_sequences x data ranks)"
        )
    return data.count


def _data_ranks_from_batch(
    reader: KeyReader,
    sizes: tuple[int, int, int],
    launched: DataRanks | None,
    context: ImportContext,
) -> DataRanks | None:
    """Return the data ranks that the three sizes of a batch tell, unless --ranks says others."""
    total, micro, steps = sizes
    count, rest = divmod(total, micro * steps)
    product = f"{BATCH[0]} / ({BATCH[1]} x {BATCH[2]}) = {total} / ({micro} x {steps})"
    if launched is None:
        return None
    if rest == 0 and (context.ranks is None or launched.count == count):
        return DataRanks(count=count, why=product, source=reader.where(*BATCH))
    wanted = f"{launched.count} data ranks" if context.ranks else "a whole number of ranks"
    reader.conflict(
        f"{product} = {total / (micro * steps):g}, not {wanted}",
        "batch.global_sequences",
        reader.where(*BATCH),
        suggestions=[f"{BATCH[0]} = {micro * steps * launched.count}"],
    )
    return launched


def _groups(reader: KeyReader, stage: int, data: int) -> int:
    """Return how many groups hold a copy each of what is shared out (MiCS, hybrid sharding)."""
    if not reader.has(_MICS) or reader.given[_MICS] == -1:
        reader.skip(_MICS, "-1: one group shares everything out")
        return 1
    size = reader.integer(_MICS, COUNT, setting="mesh.dp_shard")
    if size is None:
        return 1
    if stage != 3 or data % size:
        reader.refuse(
            _MICS,
            f"groups of {size} among {data} data ranks at stage {stage}; stage 3 and a divisor fit",
            setting="mesh.dp_shard",
        )
        return 1
    reader.skip(_MICS, f"mesh.dp_shard = {size}, mesh.dp_replicate = {data // size}")
    return data // size


def read_clipping(reader: KeyReader) -> None:
    """Map the largest norm of gradients: without a word, there is none."""
    key, setting = "gradient_clipping", "optimizer.clip_norm"
    if reader.is_auto(key):
        reader.skip(key, f"{setting} of what the run builds on")
    elif not reader.has(key):
        why = "DeepSpeed does not clip by default"
        reader.set(key, setting, "none", why, source=reader.default)
    elif (limit := reader.number(key, setting=setting)) is not None:
        why = "0 is no limit" if limit == 0 else "largest norm over all parameters and ranks"
        reader.set(key, setting, limit or "none", why)


def read_rest(reader: KeyReader) -> None:
    """Map what is said beside the numbers, and judge all other keys."""
    reader.take("steps_per_print", "observe.log_every", COUNT, "steps between step lines")
    reader.judge(TABLES.keys["rest"])
    for table, rule in TABLES.keys["tables"].items():
        if rule.switch:
            _read_off_table(reader, table, rule.switch, rule.why)
        elif rule.refused:
            reader.refuse_table(table, rule.why)
        else:
            reader.skip_table(table, rule.why)


def _read_off_table(reader: KeyReader, table: str, switch: str, why: str) -> None:
    """Accept a feature that is switched off, whatever else its table says."""
    on = table if isinstance(reader.given.get(table), bool) else f"{table}.{switch}"
    if reader.only(on, (False,), why):
        for key in reader.keys_of(table):
            if key != on:
                reader.skip(key, f"{on} is false")
    reader.know_table(table)


def read_experts(reader: KeyReader, context: ImportContext) -> ImportContext:
    """Map the section, where it is switched on; return the context with its degrees."""
    on = EXPERTS if isinstance(reader.given.get(EXPERTS), bool) else _SWITCH
    enabled = reader.flag(on, setting="mesh.ep")
    if not enabled or on == EXPERTS:
        if enabled:
            reader.refuse(on, f"a table with {_SWITCH} and autoep_size", setting="mesh.ep")
        reader.skip_all(reader.keys_of(EXPERTS), f"{on} is false")
        reader.know_table(EXPERTS)
        return context
    reader.skip(on, f"{EXPERTS}.autoep_size says over how many ranks")
    keys = (f"{EXPERTS}.autoep_size", f"{EXPERTS}.expert_tensor_parallel_size")
    context = read_expert_degrees(reader, *keys, context)
    _read_router(reader)
    reader.judge(TABLES.keys["experts"], f"{EXPERTS}.")
    return context


def _read_router(reader: KeyReader) -> None:
    """Map what overrides the router of the model; "auto" is what the model has."""
    as_model, router = "as the model has it", "model.experts"
    for name, setting in (
        ("top_k", "top_k"),
        ("num_expert_groups", "groups"),
        ("num_limited_groups", "top_groups"),
    ):
        key, why = f"{EXPERTS}.{name}", "how experts are chosen"
        reader.take(key, f"{router}.{setting}", COUNT, why, auto=as_model)
    scores = f"{EXPERTS}.score_func"
    if reader.is_auto(scores):
        reader.skip(scores, as_model)
    elif (word := reader.word(scores, ("softmax", "sigmoid"))) is not None:
        reader.set(scores, f"{router}.router", word, "of the scores")
    why = "whether weights of experts add up to 1"
    reader.take(f"{EXPERTS}.route_norm", f"{router}.renormalise", FLAG, why)
    key, why = f"{EXPERTS}.routed_scaling_factor", "factor of the weights of experts"
    reader.take(key, f"{router}.gate_scale", POSITIVE, why, auto=as_model)
