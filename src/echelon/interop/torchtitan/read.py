# SPDX-License-Identifier: Apache-2.0
"""A torchtitan configuration (TOML) -> settings. Keys are those of 0.2.2, and older.

https://github.com/pytorch/torchtitan: config/job_config.py. Its mesh is pp x dp_replicate
x dp_shard x cp x tp as here; what data and context ranks share out is FSDP 2, which is stage 3.
What its configuration does not say is written out as torchtitan has it.

Stages are listed by the names of their modules, or follow from the number of layers: the embedding
and the head count as layers there (torchtitan/distributed/pipeline_parallel.py).
"""

from __future__ import annotations

import re
from math import ceil, isinf
from typing import cast

from echelon.config.entries import flatten
from echelon.config.presets import read_preset
from echelon.core.choices.optimizers import PLAIN_OPTIMIZER
from echelon.core.settings.value_types import Integer, Real, Text
from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import BETA, COUNT, FRACTION, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.ranks import (
    assume_fewest_ranks,
    blocks_of_stages,
    data_ranks_from_launcher,
    read_degrees,
    read_expert_degrees,
    set_dtypes,
    set_offload,
)
from echelon.interop.torchtitan.abilities import FLAVORS, NAMES, ONE_STAGE, TABLES, Flavor
from echelon.schedule.build import PLAIN_SCHEDULE

TABLE = "parallelism"
TP, PP, CP = (f"{TABLE}.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
REPLICATE, SHARD = (f"{TABLE}.data_parallel_{what}_degree" for what in ("replicate", "shard"))
EP, ETP = f"{TABLE}.expert_parallel_degree", f"{TABLE}.expert_tensor_parallel_degree"
_ROTATE = f"{TABLE}.context_parallel_rotate_method"
_ROTATIONS = dict(sorted(by_word(NAMES.context_kinds).items()))
_RESHARD = f"{TABLE}.fsdp_reshard_after_forward"
OFFLOAD = "training.enable_cpu_offload"
_LEFT_OVER = Integer(minimum=-1)

SCHEDULE = f"{TABLE}.pipeline_parallel_schedule"
PARTS, POINTS = f"{TABLE}.module_fqns_per_model_part", f"{TABLE}.pipeline_parallel_split_points"
SIZE = f"{TABLE}.pipeline_parallel_layers_per_stage"
LESS = tuple(f"{TABLE}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
STAGES = "pipeline.stages"
_LAYER = re.compile(r"layers\.(\d{1,5})")

LOCAL, OLD_LOCAL = "training.local_batch_size", "training.batch_size"
GLOBAL = "training.global_batch_size"
PIECE = "parallelism.pipeline_parallel_microbatch_size"
MICRO, TOTAL = "batch.microbatch_sequences", "batch.global_sequences"
STEPS = "training.steps"
_OR_LOCAL = Integer(minimum=-1)


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every key of a torchtitan configuration."""
    reader.sections(TABLES.sections)
    layers = _read_model(reader, context)
    context = _read_degrees(reader, context)
    replicate, shard = _read_data_ranks(reader, context)
    _read_sharding(reader, shard, context)
    data = replicate * shard
    read_batch(reader, data, pp=context.degrees["pp"])
    read_pipeline(reader, layers, context)
    read_precision(reader)
    read_optimizer(reader)
    read_learning_rate(reader)
    _read_recompute(reader)
    _read_run(reader)
    _read_rest(reader)
    reader.finish()


def _read_model(reader: KeyReader, context: ImportContext) -> int | None:
    """Map the model; return its layers where they are known."""
    name, flavor = "model.name", "model.flavor"
    words = [reader.read(key, Text(), setting="model") for key in (name, flavor)]
    model, size = (str(word) for word in words)
    if (found := FLAVORS.get((model, size))) is not None:
        _set_flavor(reader, flavor, found, f"{model} {size}")
        reader.take_part(name, f"together with {flavor}")
        return _layers_of(found.preset)
    if context.model is not None:
        reader.skip_all(
            (name, flavor), f"no flavor that is known; the run builds on {context.model.name}"
        )
        return context.model.layers
    known = [f'name = "{m}", flavor = "{f}"' for m, f in FLAVORS if m == model] or ["--extends"]
    why = "its sizes stand in the code of torchtitan; --extends MODEL names yours"
    reader.refuse(flavor, f"of {name} = {reader.text(name)}: {why}", suggestions=known)
    return None


def _set_flavor(reader: KeyReader, key: str, flavor: Flavor, what: str) -> None:
    """Map a flavor to a preset, and to what it has otherwise."""
    reader.set(key, "model.preset", flavor.preset, what)
    if flavor.name:
        reader.set(key, "model.name", flavor.name, "the preset with what torchtitan has otherwise")
    for setting, value in flavor.changes.items():
        reader.set(key, setting, value, f"of {what}, in the code of torchtitan")
    length = reader.given.get("training.seq_len")
    if flavor.longest is not None and isinstance(length, int) and length > flavor.longest:
        why = f"positions beyond {flavor.longest} are stretched as YaRN does, and here they are not"
        suggestions = (f"training.seq_len = {flavor.longest}",)
        reader.refuse(key, why, suggestions=suggestions, setting="batch.sequence_length")


def _layers_of(preset: str) -> int | None:
    found = read_preset("models", preset)
    layers = dict(flatten(found.tables)).get("model.layers") if found else None
    return layers if isinstance(layers, int) else None


def _read_degrees(reader: KeyReader, context: ImportContext) -> ImportContext:
    degrees = read_degrees(reader, {"tp": TP, "pp": PP, "cp": CP})
    if degrees["tp"] > 1:
        why = "tensor ranks always cut norms and residuals too"
        reader.set(TP, "mesh.sequence_parallel", True, why, source=reader.default)
    word = reader.word(_ROTATE, _ROTATIONS, setting="context.kind")
    if degrees["cp"] == 1:
        reader.skip(_ROTATE, "a sequence is not cut")
    elif word is not None or not reader.has(_ROTATE):
        kind, why = _ROTATIONS[word or "allgather"], "how pieces of a sequence meet"
        reader.set_or_default(_ROTATE, "context.kind", kind, why)
    return read_expert_degrees(reader, EP, ETP, context.with_degrees(**degrees))


def _read_data_ranks(reader: KeyReader, context: ImportContext) -> tuple[int, int]:
    """Map the data ranks; those that share out may be whatever ranks are left."""
    replicate = reader.integer(REPLICATE, COUNT, setting="mesh.dp_replicate") or 1
    why = "copies of what is shared out"
    reader.set_or_default(REPLICATE, "mesh.dp_replicate", replicate, why)
    given = reader.integer(SHARD, _LEFT_OVER, setting="mesh.dp_shard")
    model = context.model_ranks
    if given is None or given == -1:
        shard = _left_over(reader, replicate, context)
        if shard is not None:
            why = f"what is left of the ranks: {shard * replicate * model} / {replicate} x {model}"
            reader.set(SHARD, "mesh.dp_shard", shard, why)
        return replicate, shard or 1
    if given == 0:
        reader.refuse(SHARD, "-1 takes what is left of the ranks", suggestions=("-1", "1"))
        return replicate, 1
    if context.ranks not in (None, replicate * given * model):
        reader.conflict(
            f"{replicate} x {given} data ranks of {model} ranks that hold one model are "
            f"{replicate * given * model} ranks, but --ranks {context.ranks}",
            "mesh.dp_shard",
            f"{reader.where(REPLICATE, SHARD)}, --ranks {context.ranks}",
            suggestions=(f"--ranks {replicate * given * model}", f"{SHARD} = -1"),
        )
    reader.set(SHARD, "mesh.dp_shard", given, "data ranks that share out")
    return replicate, given


def _left_over(reader: KeyReader, replicate: int, context: ImportContext) -> int | None:
    if context.ranks_unknown:
        return assume_fewest_ranks(reader, context, replicate).count // replicate
    data = data_ranks_from_launcher(reader, context)
    if data is None:
        return None
    if data.count % replicate:
        reader.conflict(
            f"{data.count} data ranks are not {replicate} copies of what is shared out",
            "mesh.dp_replicate",
            f"{reader.where(REPLICATE)}, {data.source}",
        )
        return None
    return data.count // replicate


def _read_sharding(reader: KeyReader, shard: int, context: ImportContext) -> None:
    """Map FSDP 2, which shares parameters out as soon as there are ranks to share them."""
    reshard = reader.word(_RESHARD, ("default", "always", "never"))
    offload = reader.flag(OFFLOAD, setting="zero.parameter_offload")
    if shard * context.degrees["cp"] == 1:
        reader.set(SHARD, "zero.stage", 0, "no ranks share parameters out", source=reader.default)
        reader.skip(_RESHARD, "parameters are whole on every rank")
        reader.only(OFFLOAD, (False,), "parameters are whole on every rank")
        return
    why = "FSDP 2 shares parameters out over data and context ranks"
    reader.set(SHARD, "zero.stage", 3, why, source=reader.where(SHARD, CP))
    pp = context.degrees["pp"]
    word = reshard if reshard in ("always", "never") else ("never" if pp > 1 else "always")
    why = "whether a unit is gathered again for backward; by default unless there is a pipeline"
    reader.set_or_default(_RESHARD, "zero.reshard_after_forward", word, why)
    set_offload(reader, OFFLOAD, offload, "where slices rest between uses")


def _read_recompute(reader: KeyReader) -> None:
    """Map which blocks are redone in backward; a table that is absent leaves it to us."""
    table = "activation_checkpoint"
    mode, option = f"{table}.mode", f"{table}.selective_ac_option"
    setting = "recompute.policy"
    if reader.given.get(mode) == "memory_budget":
        reader.skip(mode, "recompute says what is redone: it changes no number")
        word = None
    else:
        word = reader.word(mode, ("none", "full", "selective"), setting=setting)
    for key in reader.keys_of(table):
        if key not in (mode, option):
            reader.skip(key, "a block is redone from its own input, or not at all")
    if word in ("none", "full"):
        reader.set(mode, setting, word, "which blocks are redone")
        reader.skip(option, f"it is about {mode} = selective")
    elif word == "selective":
        every = reader.given.get(option, "2")
        reader.known[option] = None
        if every == "op":
            reader.set(mode, setting, "selective", "products are kept, and cheap operators redone")
            reader.skip(option, "torchtitan redoes every second product too: no number changes")
            return
        if not str(every).isdigit() or not int(str(every)):
            why = "which products are kept inside a block is not a setting; whole blocks are redone"
            reader.refuse(option, why, suggestions=('"2"', f'{mode} = "full"'), setting=setting)
            return
        reader.set(mode, setting, "full", f"whole blocks, one of {every}")
        why = f"one of {every} blocks: torchtitan starts with block {int(str(every)) - 1}, here 0"
        reader.set_or_default(option, "recompute.every", int(str(every)), why)
    else:
        reader.skip(option, f"it is about {mode} = selective")


def _read_run(reader: KeyReader) -> None:
    reader.take("metrics.log_freq", "observe.log_every", COUNT, "steps between step lines")
    interval, keep = "checkpoint.interval", "checkpoint.keep_latest_k"
    switches = [reader.flag(f"checkpoint.{name}") for name in ("enable", "enable_checkpoint")]
    for name in ("enable", "enable_checkpoint"):
        reader.skip(f"checkpoint.{name}", f"{interval} says how often")
    steps = reader.integer(interval, COUNT, setting="checkpoint.every")
    newest = reader.integer(keep, FROM_ZERO, setting="checkpoint.keep")
    if any(switches):
        reader.set_or_default(interval, "checkpoint.every", steps or 500, "steps between")
        if newest is not None:
            reader.set(keep, "checkpoint.keep", newest or "all", "newest that stay; 0 is all")
    else:
        reader.skip_all((interval, keep), "no checkpoint is written")
    _read_validation(reader)


def _read_validation(reader: KeyReader) -> None:
    old, freq, steps = (f"validation.{name}" for name in ("enabled", "freq", "steps"))
    switch = old if reader.has(old) else "validation.enable"
    on = reader.flag(switch, setting="train.validate_every")
    every = reader.integer(freq, COUNT, setting="train.validate_every")
    count = reader.integer(steps, _LEFT_OVER, setting="train.validation_batches")
    if not on:
        reader.skip_all((switch, freq, steps), "nothing is validated")
        return
    reader.skip(switch, f"{freq} says how often")
    reader.set_or_default(freq, "train.validate_every", every or 10, "steps between")
    if count is not None and count > 0:
        reader.set(steps, "train.validation_batches", count, "global batches of a validation")
    else:
        reader.skip(steps, "-1 is all of it; train.validation_batches says how many")


def _read_rest(reader: KeyReader) -> None:
    reader.judge(TABLES.keys["rest"])
    reader.skip_table("fault_tolerance", "fault_tolerance.enable is false")
    for table, rule in TABLES.keys["tables"].items():
        reader.skip_all([key for key in reader.keys_of(table) if key not in reader.known], rule.why)
        reader.know_table(table)


def read_pipeline(reader: KeyReader, layers: int | None, context: ImportContext) -> None:
    """Map the schedule, and which blocks each stage holds."""
    pp = context.degrees["pp"]
    name = _read_schedule(reader, pp)
    less = [reader.integer(key, FROM_ZERO, setting=STAGES) for key in LESS]
    size = reader.integer(SIZE, COUNT, setting=STAGES)
    if pp == 1:
        reader.skip_all((PARTS, POINTS, SIZE, *LESS), "there is one stage")
        return
    key, stages = _listed(reader)
    if key:
        for other in (PARTS, POINTS, SIZE, *LESS):
            if other != key:
                reader.skip(other, f"{key} lists the stages")
    elif layers:
        key = SIZE
        ends = [1 if count is None else count for count in less]
        count = ceil((layers + sum(ends)) / size) if size else pp * (1 if name in ONE_STAGE else 2)
        if (layers + sum(ends)) // count < max(ends):
            reader.refuse(key, f"{layers} layers + {sum(ends)} in {count} stages", setting=STAGES)
            return
        stages = _counted(layers, count, ends)
        reader.skip_all(LESS, f"{ends[0]} and {ends[1]} count as layers at the ends")
    if stages is None:
        return
    if len(stages) % pp:
        reader.refuse(key, f"{len(stages)} stages on {pp} ranks", setting=STAGES)
        return
    sizes = ", ".join(str(len(stage)) for stage in stages)
    reader.set_or_default(key, STAGES, stages, f"blocks of each stage: {sizes}")
    virtual = len(stages) // pp
    reader.set_or_default(key, "pipeline.virtual_stages", virtual, "stages of a rank")


def _read_schedule(reader: KeyReader, pp: int) -> str:
    names = {word.lower(): name for name, word in NAMES.schedules.items()}
    given = reader.given.get(SCHEDULE)
    if pp == 1:
        reader.skip(SCHEDULE, "there is one stage")
        return PLAIN_SCHEDULE
    if not reader.has(SCHEDULE):
        return PLAIN_SCHEDULE
    here = names.get(str(given).lower())
    if here is None:
        suggestions = [f'"{word}"' for word in NAMES.schedules.values()]
        reader.refuse(SCHEDULE, "there is no such schedule", suggestions=suggestions)
        return PLAIN_SCHEDULE
    reader.set(SCHEDULE, "pipeline.schedule", here, "order of forward and backward passes")
    return here


def _listed(reader: KeyReader) -> tuple[str, list[list[int]] | None]:
    """Return the key that lists the stages, and their blocks; "" and None where none does."""
    if reader.has(PARTS):
        parts = reader.given[PARTS]
        if isinstance(parts, list):
            lists = [cast("list[object]", part) for part in cast("list[object]", parts)]
            names = [[str(name) for name in part] for part in lists]
            found = [[int(m[1]) for n in part if (m := _LAYER.fullmatch(n))] for part in names]
            return PARTS, found
        reader.refuse(PARTS, "a list of modules for each part of the model", setting=STAGES)
        return PARTS, None
    points = reader.given.get(POINTS)
    if not reader.has(POINTS) or points in ([], ""):
        reader.skip(POINTS, "no point of a split")
        return "", None
    reader.refuse(POINTS, f"the old form of {PARTS}", suggestions=(f"{PARTS} = [[...], ...]",))
    return POINTS, None


def _counted(layers: int, stages: int, ends: list[int]) -> list[list[int]]:
    """Return blocks of stages of equal size, where the ends have so many layers less."""
    size, rest = divmod(layers + sum(ends), stages)
    sizes = [size + (stage < rest) for stage in range(stages)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return blocks_of_stages(sizes)


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
