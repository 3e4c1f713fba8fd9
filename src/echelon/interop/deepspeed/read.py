# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed JSON -> settings. Keys and defaults are those of DeepSpeed 0.19 and before.

https://www.deepspeed.ai/docs/config-json; "auto" as Hugging Face's integration resolves it.

The section of experts names the modules of a model by patterns; here the model has its experts, and
the run builds on it. Numbers are read by `read_numbers.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path

from echelon.core.axis import SHARD_AXES
from echelon.core.mesh import Mesh
from echelon.core.plan import DTYPE_BYTES
from echelon.core.settings.value_types import Text
from echelon.interop.abilities import by_word
from echelon.interop.deepspeed.abilities import EXCHANGE, OFFLOAD_DEVICES, TABLES
from echelon.interop.deepspeed.read_numbers import read_optimizer, read_precision, read_scheduler
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FLAG, FROM_ZERO, POSITIVE, ZERO_STAGE, KeyReader
from echelon.interop.ranks import (
    HOST_OR_NONE,
    DataRanks,
    data_ranks_from_launcher,
    read_count,
    read_expert_degrees,
    set_batch,
    set_data_mesh,
    shards_of_experts,
)
from echelon.layout.data_groups import ranks_per_node

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
    read_engine(reader, stage, gradients, data, context)


def read_engine(
    reader: KeyReader, stage: int, gradients: str, data: int, context: ImportContext
) -> None:
    """Note what becomes of all that says nothing of ranks, batch and dtypes, to the last key."""
    _read_zero(reader, stage, gradients, data, context)
    _read_activations(reader)
    read_optimizer(reader)
    read_scheduler(reader)
    _read_clipping(reader)
    _read_rest(reader)
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


def _read_clipping(reader: KeyReader) -> None:
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


def _read_rest(reader: KeyReader) -> None:
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


TABLE = "zero_optimization"
_PREFETCH = f"{TABLE}.stage3_prefetch_bucket_size"
_PERSISTENCE = f"{TABLE}.stage3_param_persistence_threshold"
_MAX_LIVE = f"{TABLE}.stage3_max_live_parameters"
_MAX_REUSE = f"{TABLE}.stage3_max_reuse_distance"
_BUCKET = f"{TABLE}.reduce_bucket_size"
_SECONDARY = f"{TABLE}.zero_hpz_partition_size"

# DeepSpeed's own, of the two that bound what stays whole between forward and backward.
_DEFAULT_MAX_LIVE = 10**9


def read_stage(reader: KeyReader) -> int:
    """Map the stage, and return it; the old form of the table is true or false."""
    if isinstance(old := reader.given.get(TABLE), bool):
        reader.known[TABLE] = None
        reader.set(TABLE, "zero.stage", int(old), "true is stage 1")
        return int(old)
    key = f"{TABLE}.stage"
    if not reader.has(key):
        why = "DeepSpeed shares nothing out by default"
        reader.set(key, "zero.stage", 0, why, source=reader.default)
    return reader.take(key, "zero.stage", ZERO_STAGE, "what data ranks share out") or 0


def _read_zero(
    reader: KeyReader, stage: int, gradients: str, data: int, context: ImportContext
) -> None:
    """Map buckets, units and offload; `gradients` is the dtype in which they accumulate."""
    _read_bucket(reader, stage, gradients, data, context)
    stage_3_keys = (_PREFETCH, _PERSISTENCE, _MAX_LIVE, _MAX_REUSE, _SECONDARY)
    if stage == 3:
        _read_persistence(reader, context)
        _read_prefetch(reader, context)
        _read_resharding(reader, context)
        _read_secondary(reader, context)
    else:
        reader.skip_all(stage_3_keys, f"it is about stage 3, and the stage is {stage}")
    _read_offload(reader)


def _read_bucket(
    reader: KeyReader, stage: int, gradients: str, data: int, context: ImportContext
) -> None:
    if stage == 3 or data * context.degrees["cp"] == 1:
        why = "a bucket is a unit at stage 3" if stage == 3 else "one data rank reduces nothing"
        reader.skip(_BUCKET, why)
        return
    size = DTYPE_BYTES[gradients]
    if reader.is_auto(_BUCKET):
        if context.model is not None:
            hidden = context.model.hidden
            why = f"hidden^2 elements, as Hugging Face has it: {hidden}^2 x {size} bytes"
            reader.set(_BUCKET, "zero.bucket_bytes", hidden * hidden * size, why)
        return
    elements = reader.integer(_BUCKET, setting="zero.bucket_bytes")
    if elements is not None:
        why = f"{elements} elements x {size} bytes of {gradients}"
        reader.set(_BUCKET, "zero.bucket_bytes", elements * size, why)


def _read_persistence(reader: KeyReader, context: ImportContext) -> None:
    setting = "zero.keep_whole_below"
    if reader.is_auto(_PERSISTENCE):
        if context.model is not None:
            hidden = context.model.hidden
            why = f"10 x hidden, as Hugging Face has it: parameters up to 10 x {hidden}"
            reader.set(_PERSISTENCE, setting, 10 * hidden + 1, why)
        return
    elements = reader.integer(_PERSISTENCE, FROM_ZERO, setting=setting)
    if elements is not None:
        why = f"parameters of up to {elements} elements are not cut"
        reader.set(_PERSISTENCE, setting, elements + 1 if elements else 0, why)


def _read_prefetch(reader: KeyReader, context: ImportContext) -> None:
    """Map how much is gathered ahead to whole units, within what may be whole at a time."""
    units, keys, whys = None, list[str](), list[str]()
    block = context.block_elements
    if reader.is_auto(_PREFETCH):
        if context.model is not None:
            hidden = context.model.hidden
            units, keys = 1, [_PREFETCH]
            whys.append(
                f"0.9 x hidden^2, as Hugging Face has it: {int(0.9 * hidden * hidden)} elements "
                f"of a block of {block}: one unit"
            )
    elif (elements := reader.integer(_PREFETCH, setting="zero.prefetch")) is not None and block:
        units, keys = min(ceil(elements / block), context.stage_blocks), [_PREFETCH]
        whys.append(f"{elements} elements of blocks of {block}: {units} units")
    live = reader.integer(_MAX_LIVE, setting="zero.prefetch")
    if live is not None and block:
        fit = max(0, live // block - 1)
        if fit < (1 if units is None else units):
            units, keys = fit, [*keys, _MAX_LIVE]
            whys.append(f"{live} elements whole at a time: {fit} beside the one that computes")
        else:
            reader.skip(_MAX_LIVE, f"at most 1 + zero.prefetch blocks of {block} are whole")
    if units is not None:
        reader.set(keys[-1], "zero.prefetch", units, "; ".join(whys), source=reader.where(*keys))
        reader.skip_all(keys[:-1], f"less, because of {keys[-1]}")


def _read_resharding(reader: KeyReader, context: ImportContext) -> None:
    """Map the reuse distance: from the forward of the first block to its backward.

    DeepSpeed keeps a unit that is needed again within the distance, as long as what is whole stays
    within its other bound. Here that is decided for all units together.
    """
    distance = reader.integer(_MAX_REUSE, setting="zero.reshard_after_forward")
    if distance is None or context.model is None:
        return
    bound = reader.given.get(_MAX_LIVE)
    live = int(bound) if isinstance(bound, int | float) else _DEFAULT_MAX_LIVE
    whole = context.block_elements * context.stage_blocks
    kept = distance >= 2 * whole and live >= whole
    word = "never" if kept else "always"
    why = (
        f"a stage has {whole} elements of blocks, twice that lies between forward and backward of "
        f"the first: {'both bounds hold it' if kept else 'more than is kept'}"
    )
    reader.set(_MAX_REUSE, "zero.reshard_after_forward", word, why)


def _read_secondary(reader: KeyReader, context: ImportContext) -> None:
    """Map over how many ranks secondary slices are cut: all of a node that share out, or none."""
    setting = "zero.secondary"
    size = reader.integer(_SECONDARY, FROM_ZERO, setting=setting)
    if size is None:
        return
    replicate, shard = (
        entry.value if entry is not None and isinstance(entry.value, int) else 1
        for axis in ("dp_replicate", "dp_shard")
        for entry in (reader.entries.get(f"mesh.{axis}"),)
    )
    pp, cp, tp = (context.degrees[axis] for axis in ("pp", "cp", "tp"))
    mesh = Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    groups = mesh.groups(*SHARD_AXES)
    near = ranks_per_node(groups, context.devices_per_node)
    kept = reader.entries.get("zero.reshard_after_forward")
    if size <= 1:
        reader.skip(_SECONDARY, "there are no secondary slices")
    elif kept is not None and kept.value == "never":
        reader.skip(_SECONDARY, "every unit is gathered once a step")
    elif size == len(groups[0]):
        reader.skip(_SECONDARY, f"all {size} ranks that share out: slices are those that rest")
    elif size == near:
        why = f"{size} ranks of each node share out, and keep what the others have, too"
        reader.set(_SECONDARY, setting, True, why)
    else:
        found = f"{near} do" if near > 1 else "none are several on each of several nodes"
        reader.refuse(
            _SECONDARY,
            f"secondary slices are cut over all ranks of a node that share out: of "
            f"{len(groups[0])} ranks on nodes of {context.devices_per_node} devices {found}",
            suggestions=[str(near)] if near > 1 else ["--ranks N", "--set cluster.preset=NAME"],
            setting=setting,
        )


HOMES = by_word(OFFLOAD_DEVICES)
OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"
_STATES_OF_ADAM = 4  # DeepSpeed counts a buffer for each of parameter, gradient and two moments.


def _read_offload(reader: KeyReader) -> None:
    """Map where slices of optimizer state and of parameters rest between uses."""
    homes = {
        OPTIMIZER: _read_home(reader, OPTIMIZER, "zero.optimizer_offload", "cpu_offload"),
        PARAMETERS: _read_home(reader, PARAMETERS, "zero.parameter_offload", "cpu_offload_params"),
    }
    reader.skip(f"{TABLE}.cpu_offload_use_pin_memory", TABLES.keys["offloaded"]["pin_memory"].why)
    buffers: list[int] = []
    for table, home in homes.items():
        _read_files(reader, table, home, buffers)
        reader.judge(TABLES.keys["offloaded"], f"{TABLE}.{table}.")
    reader.judge(TABLES.keys[OPTIMIZER], f"{TABLE}.{OPTIMIZER}.")
    if buffers:
        keys = [f"{TABLE}.{table}.buffer_count" for table in homes]
        given = [key for key in keys if reader.has(key)]
        reader.set(
            given[-1],
            "zero.offload_buffers",
            max(2, *buffers),
            f"buckets in memory at once, at least 2 ({_STATES_OF_ADAM} buffers of optimizer state "
            "are one bucket)",
            source=reader.where(*given),
        )
        reader.skip_all(given[:-1], f"together with {given[-1]}")


def _read_home(reader: KeyReader, table: str, setting: str, old: str) -> str:
    key, old_key = f"{TABLE}.{table}.device", f"{TABLE}.{old}"
    reader.take(key, setting, HOMES, "where they rest between uses")
    # DeepSpeed's documentation and its code do not agree on the old name of the second one.
    for name in (old_key, old_key.removesuffix("s")) if table == PARAMETERS else (old_key,):
        reader.take(name, setting, HOST_OR_NONE, f"the old name of {table}")
    entry = reader.entries.get(setting)
    return str(entry.value) if entry else "none"


def _read_files(reader: KeyReader, table: str, home: str, buffers: list[int]) -> None:
    prefix = f"{TABLE}.{table}"
    names = ("nvme_path", "buffer_count", *TABLES.keys["files"])
    if home != "nvme":
        why = f"it is about files, and the device is {home}"
        reader.skip_all((f"{prefix}.{name}" for name in names), why)
        return
    folder = reader.read(f"{prefix}.nvme_path", Text(), setting="zero.offload_dir")
    if isinstance(folder, str):
        absolute = str(Path(folder).absolute())
        reader.set(f"{prefix}.nvme_path", "zero.offload_dir", absolute, "folder of the files")
    count = reader.integer(f"{prefix}.buffer_count", setting="zero.offload_buffers")
    if count is not None:
        buffers.append(count // _STATES_OF_ADAM if table == OPTIMIZER else count)
    reader.judge(TABLES.keys["files"], f"{prefix}.")


def _read_activations(reader: KeyReader) -> None:
    """Map activation_checkpointing: it says how inputs are stored, not which blocks are redone."""
    table = "activation_checkpointing"
    key = f"{table}.cpu_checkpointing"
    if reader.flag(key, setting="recompute.offload"):
        reader.set(key, "recompute.policy", "full", "stored inputs belong to recomputed blocks")
        reader.set(key, "recompute.offload", "host", "where stored inputs wait for backward")
    else:
        reader.skip(key, "stored inputs stay on the device")
    reader.judge(TABLES.keys["activations"], f"{table}.")
