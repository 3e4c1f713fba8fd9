# SPDX-License-Identifier: Apache-2.0
"""An Accelerate YAML -> settings: FSDP 1 and 2, DeepSpeed, plain data parallelism. Accelerate 1.15.

https://huggingface.co/docs/accelerate/usage_guides/fsdp. Its truth values may be strings, and may
be any of those of YAML 1.1. What the DeepSpeed plugin leaves open is DeepSpeed's: gradients
accumulate and are summed in the dtype of parameters (usage_guides/deepspeed).

`cp_size` ranks gather keys and values, or pass them on with an all-to-all by one place at a time,
which is a ring; `sp_size` ranks exchange heads, as DeepSpeed does. Only one of the two may be
above 1. Accelerate 1.15, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from echelon.core.rulebook.interop import IMPORT_KIND
from echelon.core.settings.value_types import Text
from echelon.interop.abilities import by_word
from echelon.interop.accelerate.abilities import NAMES, TABLES
from echelon.interop.deepspeed.abilities import EXCHANGE
from echelon.interop.deepspeed.read import HOMES
from echelon.interop.deepspeed.read import read_keys as read_deepspeed
from echelon.interop.followed import adopt, inner_reader
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, ZERO_STAGE, KeyReader
from echelon.interop.ranks import DEGREES as DEGREE_WORDS
from echelon.interop.ranks import (
    HOST_OR_NONE,
    data_ranks_from_launcher,
    set_batch,
    set_data_mesh,
    set_dtypes,
    set_offload,
    set_sequence_parallel,
)

TABLE, MEGATRON_TABLE = "parallelism_config", "megatron_lm_config"
DEGREES = {"tp_size": "tp", "dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard"}
CP, SP, STRATEGY = (f"{TABLE}.{TABLE}_{key}" for key in ("cp_size", "sp_size", "cp_comm_strategy"))
CONTEXT_STRATEGIES = dict(sorted(by_word(NAMES.context_kinds).items()))

FSDP, MEGATRON = "fsdp_config", "MEGATRON_LM"
DISTRIBUTED = f"{MEGATRON_TABLE}.megatron_lm_use_distributed_optimizer"
PLAIN_TYPES = {
    "MULTI_GPU": "zero.stage = 0: whole replicas",
    "MULTI_CPU": "zero.stage = 0: whole replicas",
    "NO": "zero.stage = 0: one process",
}
OTHER_TYPES = {"XLA": "there is no TPU", "TP": "set mesh.tp: every matrix is cut over it"}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")

_WRAP = f"{FSDP}.fsdp_auto_wrap_policy"
_CLASSES = f"{FSDP}.fsdp_transformer_layer_cls_to_wrap"
_SMALLEST = f"{FSDP}.fsdp_min_num_params"
_BACKWARD = f"{FSDP}.fsdp_backward_prefetch"
FORWARD = f"{FSDP}.fsdp_forward_prefetch"
OFFLOAD = f"{FSDP}.fsdp_offload_params"
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_ONE_AHEAD = "one unit ahead, in forward and backward"
_PREFETCHES = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NO_PREFETCH": 0}
_DEFAULT_SMALLEST = 10**8  # parameters, in Accelerate


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every key of an Accelerate configuration."""
    reader.given = _parse_values(reader.given)
    reader.sections(TABLES.sections)
    kind = _read_type(reader)
    version = _read_version(reader)
    degrees = read_degrees(reader) | (read_megatron_degrees(reader) if kind == MEGATRON else {})
    if kind == "NO" and context.ranks is None and not reader.has("num_processes"):
        context = replace(context, ranks=1)
    context = context.with_degrees(**{k: v for k, v in degrees.items() if k in ("tp", "pp", "cp")})
    if kind == "DEEPSPEED" and (inner := inner_reader(reader, FILE, "DeepSpeed")) is not None:
        _read_file(reader, inner, degrees, context)
        return
    _read_precision(reader, kind)
    stage, hybrid = _stage_of(reader, kind, version)
    data = read_ranks(reader, stage, hybrid, degrees, context)
    if kind == "DEEPSPEED":
        _read_plugin(reader, data, context)
    elif kind == MEGATRON:
        _read_megatron(reader, data, context)
    for table, owner in ((_PLUGIN, "DEEPSPEED"), (MEGATRON_TABLE, MEGATRON)):
        if kind != owner:
            reader.skip_table(table, f"distributed_type is not {owner}")
    if kind == "FSDP":
        read_units(reader, stage, version, context)
        _read_recompute(reader)
    else:
        reader.skip_table(FSDP, "distributed_type is not FSDP")
    _read_rest(reader)
    reader.finish()


def _read_file(
    reader: KeyReader, inner: KeyReader, degrees: Mapping[str, int], context: ImportContext
) -> None:
    """Map a file of DeepSpeed's own, which says all but the processes; "auto" is the script's."""
    stage = inner.given.get("zero_optimization.stage")
    data = read_ranks(reader, stage if isinstance(stage, int) else 0, False, degrees, context)
    read_deepspeed(inner, replace(context, ranks=data * context.model_ranks))
    adopt(reader, FILE, inner)
    why = "deepspeed_config_file says it, and Accelerate takes only one of the two"
    own = [key for key in reader.keys_of(_PLUGIN) if key not in reader.known]
    reader.skip_all((*own, "mixed_precision"), why)
    for table in (FSDP, MEGATRON_TABLE):
        reader.skip_table(table, "distributed_type is DEEPSPEED")
    _read_rest(reader)
    reader.finish()


def _stage_of(reader: KeyReader, kind: str, version: int) -> tuple[int, bool]:
    """Return the stage of ZeRO, and whether each machine has a copy of what is shared out."""
    if kind == "FSDP":
        return _read_strategy(reader, version)
    if kind == MEGATRON:
        return int(bool(reader.flag(DISTRIBUTED, setting="zero.stage"))), False
    return (read_stage(reader), False) if kind == "DEEPSPEED" else (0, False)


def _parse_values(given: Mapping[str, object]) -> dict[str, object]:
    """Return the keys with truth values and numbers in strings as what they mean."""
    plain: dict[str, object] = {}
    for key, value in given.items():
        table, _, name = key.rpartition(".")
        # Its launcher takes names in fsdp_config without their prefix too.
        full = f"{FSDP}.fsdp_{name}" if table == FSDP and not name.startswith("fsdp") else key
        plain[full] = _parse_value(value) if full != "mixed_precision" else value
    # YAML 1.1 reads the word no as false.
    if plain.get("mixed_precision") is False:
        plain["mixed_precision"] = "no"
    return plain


def _parse_value(value: object) -> object:
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in TRUE[:-1]:
        return True
    if word in FALSE[:-1]:
        return False
    if word.isdigit():
        return int(word)
    return None if word in ("none", "null", "") else value


def _read_type(reader: KeyReader) -> str:
    """Return how Accelerate would train; without a word for it, by its processes."""
    key = "distributed_type"
    # YAML 1.1 reads the word NO as false.
    if reader.given.get(key) is False:
        reader.skip(key, PLAIN_TYPES["NO"])
        return "NO"
    types = ("FSDP", "DEEPSPEED", MEGATRON, *PLAIN_TYPES)
    kind = str(reader.given.get(key))
    if not reader.has(key):
        number = reader.given.get("num_processes")
        return "MULTI_GPU" if isinstance(number, int) and number > 1 else "NO"
    if kind in types:
        reader.skip(key, PLAIN_TYPES.get(kind, "zero.stage follows from its table"))
        return kind
    why = OTHER_TYPES.get(kind, "there is no such type")
    reader.note(IMPORT_KIND, f"{key} = {reader.text(key)}: {why}", key, reader.where(key), types)
    return "NO"


def _read_version(reader: KeyReader) -> int:
    key = f"{FSDP}.fsdp_version"
    if reader.only(key, (1, 2), "one engine; it says how the other keys are meant"):
        version = reader.given.get(key)
        return version if isinstance(version, int) else 1
    return 1


def _read_strategy(reader: KeyReader, version: int) -> tuple[int, bool]:
    """Map what is shared out; return the stage, and whether each machine has a copy."""
    old, new = f"{FSDP}.fsdp_sharding_strategy", f"{FSDP}.fsdp_reshard_after_forward"
    setting = "zero.reshard_after_forward"
    if version == 2:
        reader.skip(old, "FSDP 2 has fsdp_reshard_after_forward instead")
        kept = reader.flag(new, setting=setting)
        reader.set_or_default(new, "zero.stage", 3, "FSDP 2 shares out parameters too")
        if kept is None and reader.has(new):
            return 3, False
        word = "never" if kept is False else "always"
        reader.set_or_default(new, setting, word, "whether a unit is gathered again")
        return 3, False
    key = old if reader.has(old) or not reader.has(new) else new
    reader.skip(new if key == old else old, f"{key} says it")
    value = reader.given.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(STRATEGIES):
        name: str | None = STRATEGIES[value - 1]
    else:
        name = reader.word(key, STRATEGIES, setting="zero.stage")
    if name is None:
        if reader.has(key):
            return 3, False
        name = "FULL_SHARD"
    if name == "NO_SHARD":
        reader.set_or_default(key, "zero.stage", 0, "gradients are all-reduced")
        return 0, False
    reader.set_or_default(key, "zero.stage", 3, "slices of parameters rest between steps")
    kept = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    why = "whole from forward to the end of backward" if kept else "gathered again for backward"
    reader.set_or_default(key, setting, "never" if kept else "always", why)
    return 3, name.startswith("HYBRID")


def _read_precision(reader: KeyReader, kind: str) -> None:
    """Map mixed_precision: what FSDP computes and sends is half, what it keeps is fp32.

    DeepSpeed accumulates in half, too, and keeps a copy in fp32 that its optimizer updates.
    """
    key = "mixed_precision"
    word = reader.word(key, ("no", "fp16", "bf16", "fp8"), setting="precision.parameters")
    if word == "fp8":
        why = "nothing is computed in 8 bits"
        reader.refuse(key, why, suggestions=('"bf16"',), setting="precision.parameters")
        return
    if word is None and reader.has(key):
        return
    half = word if word in ("fp16", "bf16") else "fp32"
    reduction = "fp32" if kind in PLAIN_TYPES else half
    gradients = half if kind == "DEEPSPEED" else "fp32"
    set_dtypes(reader, key, half, gradients, reduction, "fp32")
    if word == "fp16":
        why = "GradScaler, as Accelerate makes it"
        for name, value in (
            ("loss_scaling", "dynamic"),
            ("loss_scale", 65536.0),
            ("loss_scale_window", 2000),
            ("loss_scale_hysteresis", 1),
        ):
            reader.set(key, f"precision.{name}", value, why)


def _read_recompute(reader: KeyReader) -> None:
    key, offload = (f"{FSDP}.fsdp_activation_checkpointing{end}" for end in ("", "_offload"))
    on = reader.flag(key, setting="recompute.policy")
    if on is not None:
        why = "blocks keep their input only" if on else "every block keeps what backward needs"
        reader.set(key, "recompute.policy", "full" if on else "none", why)
    reader.take(offload, "recompute.offload", HOST_OR_NONE, "of stored inputs")


def _read_rest(reader: KeyReader) -> None:
    reader.judge(TABLES.keys["rest"])
    for table, rule in TABLES.keys["tables"].items():
        (reader.refuse_table if rule.refused else reader.skip_table)(table, rule.why)
    key = "dynamo_config.dynamo_backend"
    for name in (key, "dynamo_backend"):
        if reader.only(name, (False, "NO", "no"), "nothing is compiled"):
            reader.skip_table("dynamo_config", "nothing is compiled")


_PLUGIN = "deepspeed_config"
_DEFAULT_STAGE = 2  # of ZeRO, in Accelerate
STEPS, CLIP = f"{_PLUGIN}.gradient_accumulation_steps", f"{_PLUGIN}.gradient_clipping"
FILE = f"{_PLUGIN}.deepspeed_config_file"


def read_stage(reader: KeyReader) -> int:
    """Map the stage of ZeRO, and return it; a file of DeepSpeed's own is to be imported itself."""
    if reader.has(FILE) and reader.given[FILE] not in ("none", ""):
        why = "it is not where this file says: without it the stage and all it says are unknown"
        reader.refuse(FILE, why)
    key = f"{_PLUGIN}.zero_stage"
    stage = reader.integer(key, ZERO_STAGE, setting="zero.stage")
    stage = _DEFAULT_STAGE if stage is None else stage
    reader.set_or_default(key, "zero.stage", stage, "what data ranks share out")
    return stage


def _read_plugin(reader: KeyReader, data: int, context: ImportContext) -> None:
    """Map where slices rest, clipping and accumulation."""
    for what, table in (("optimizer", "optimizer"), ("parameter", "param")):
        key = f"{_PLUGIN}.offload_{table}_device"
        home = reader.take(key, f"zero.{what}_offload", HOMES, "where they rest between uses")
        path = f"{_PLUGIN}.offload_{table}_nvme_path"
        folder = reader.read(path, Text(), setting="zero.offload_dir")
        if home == "nvme" and isinstance(folder, str) and folder != "none":
            reader.set(path, "zero.offload_dir", folder, "folder of the files")
        else:
            reader.skip(path, f"nothing of the {what} rests in files")
    steps = reader.integer(STEPS, COUNT, setting="batch.global_sequences")
    if steps is not None:
        set_batch(reader, (STEPS, STEPS, STEPS), (None, None, steps), data, context.microbatch)
    limit = reader.number(CLIP, setting="optimizer.clip_norm")
    if limit is not None:
        reader.set(CLIP, "optimizer.clip_norm", limit or "none", "largest norm; 0 is no limit")
    reader.judge(TABLES.keys["plugin"])


def _read_megatron(reader: KeyReader, data: int, context: ImportContext) -> None:
    """Map what Accelerate hands on to Megatron-LM, but for its degrees."""
    stage = int(bool(reader.given.get(DISTRIBUTED)))
    reader.set_or_default(DISTRIBUTED, "zero.stage", stage, "1: optimizer state is shared out")
    key = f"{MEGATRON_TABLE}.megatron_lm_num_micro_batches"
    if (count := reader.integer(key, COUNT, setting="batch.global_sequences")) is not None:
        set_batch(reader, (key, key, key), (None, None, count), data, context.microbatch)
    key = f"{MEGATRON_TABLE}.megatron_lm_recompute_activations"
    if reader.flag(key, setting="recompute.policy"):
        reader.set(key, "recompute.policy", "selective", "attention is redone")
        reader.set(key, "recompute.operators", ["attention"], "attention is redone")
    else:
        reader.skip(key, "nothing is redone")
    reader.judge(TABLES.keys["megatron"], f"{MEGATRON_TABLE}.megatron_lm_")


def read_degrees(reader: KeyReader) -> dict[str, int]:
    """Map parallelism_config but for the data ranks, and return all its degrees."""
    degrees: dict[str, int] = {}
    for name, axis in DEGREES.items():
        key = f"{TABLE}.{TABLE}_{name}"
        if (degree := reader.integer(key, COUNT, setting=f"mesh.{axis}")) is None:
            continue
        degrees[axis] = degree
        if axis == "tp":
            reader.set(key, f"mesh.{axis}", degree, "ranks that hold one model together")
        else:
            reader.take_part(key, f"mesh.{axis}, together with num_processes")
    if (cp := _read_context(reader)) is not None:
        degrees["cp"] = cp
    return degrees


def read_megatron_degrees(reader: KeyReader) -> dict[str, int]:
    """Map the degrees of megatron_lm_config, and return them."""
    names = {axis: f"{MEGATRON_TABLE}.megatron_lm_{axis}_degree" for axis in ("tp", "pp")}
    degrees = {
        axis: reader.take(key, f"mesh.{axis}", COUNT, DEGREE_WORDS[axis]) or 1
        for axis, key in names.items()
    }
    key = f"{MEGATRON_TABLE}.megatron_lm_sequence_parallelism"
    on = bool(reader.flag(key, setting="mesh.sequence_parallel"))
    set_sequence_parallel(reader, key, on, degrees["tp"])
    return degrees


def read_ranks(
    reader: KeyReader, stage: int, hybrid: bool, degrees: Mapping[str, int], context: ImportContext
) -> int:
    """Map the data ranks to the mesh, copy by copy of what is shared out; return how many."""
    key = "num_processes"
    ranks = reader.integer(key, COUNT, setting="mesh.dp_shard")
    machines = reader.integer("num_machines", COUNT) or 1
    if ranks is not None and context.ranks not in (None, ranks):
        reader.conflict(
            f"{key} = {ranks}, but --ranks {context.ranks}",
            "mesh.dp_shard",
            f"{reader.where(key)}, --ranks {context.ranks}",
        )
        return 1
    known = context if ranks is None else replace(context, ranks=ranks)
    data = data_ranks_from_launcher(reader, known)
    if data is None:
        return 1
    if ranks is not None:
        data = replace(data, source=reader.where(key), key=key)
    groups = degrees.get("dp_replicate", machines if hybrid else 1)
    count = data.count
    if count % groups or degrees.get("dp_shard", count // groups) * groups != count:
        reader.conflict(
            f"{count} data ranks are not {groups} copies"
            + (f" of {degrees['dp_shard']} ranks that share out" if "dp_shard" in degrees else ""),
            "mesh.dp_shard",
            data.source,
            suggestions=[
                f"num_processes = {groups * degrees.get('dp_shard', 1) * context.model_ranks}"
            ],
        )
        return count
    set_data_mesh(reader, stage, replace(data, groups=groups))
    reader.skip("num_machines", "ranks on one machine are neighbours; the launcher places them")
    return count


def _read_context(reader: KeyReader) -> int | None:
    """Map how sequences are cut; return the context ranks, or None where nothing says them."""
    cp, sp = (reader.integer(key, COUNT, setting="mesh.cp") for key in (CP, SP))
    word = reader.word(STRATEGY, CONTEXT_STRATEGIES, setting="context.kind")
    if cp is not None and sp is not None and cp > 1 < sp:
        reader.conflict(
            f"{CP} = {cp} and {SP} = {sp}: Accelerate takes one of them",
            "mesh.cp",
            reader.where(CP, SP),
            suggestions=(f"{CP} = 1", f"{SP} = 1"),
        )
    elif sp is not None and sp > 1:
        reader.set(SP, "mesh.cp", sp, "pieces of a sequence")
        reader.set(SP, "context.kind", EXCHANGE, "heads are exchanged for the sequence")
        reader.skip(CP, f"{SP} cuts the sequence")
        reader.skip(STRATEGY, f"it is about {CP}")
        cp = sp
    else:
        reader.skip(SP, "1 cuts nothing")
        if cp is not None:
            reader.set(CP, "mesh.cp", cp, "ranks that hold one model together")
        if cp is None or cp == 1:
            reader.skip(STRATEGY, "a sequence is not cut")
        elif word is not None or not reader.has(STRATEGY):
            kind, why = CONTEXT_STRATEGIES[word or "allgather"], "how pieces of a sequence meet"
            reader.set_or_default(STRATEGY, "context.kind", kind, why)
    reader.judge(TABLES.keys["context"], f"{TABLE}.{TABLE}_")
    return cp


def read_units(reader: KeyReader, stage: int, version: int, context: ImportContext) -> None:
    """Map wrapping, prefetch and offload of parameters; without slices none of them counts."""
    if stage == 0:
        reader.skip_all(
            (_WRAP, _CLASSES, _SMALLEST, _BACKWARD, FORWARD), "parameters are whole on every rank"
        )
    else:
        _read_wrapping(reader, context)
        _read_prefetch(reader, version)
    host = reader.flag(OFFLOAD, setting="zero.parameter_offload")
    why = "slices of parameters, and the optimizer that updates them there"
    set_offload(reader, OFFLOAD, host, why)


def _read_wrapping(reader: KeyReader, context: ImportContext) -> None:
    """Map the policy to whole blocks: all their classes are one here."""
    setting = "zero.unit_blocks"
    policy = reader.word(_WRAP, _POLICIES, setting=setting)
    if policy is None and reader.has(_WRAP):
        return
    blocks, block = context.stage_blocks, context.block_elements
    if policy == "TRANSFORMER_BASED_WRAP":
        reader.set(_WRAP, setting, 1, "a unit is a block, whatever its class is called")
        reader.skip(_CLASSES, "every block has one class")
        reader.skip(_SMALLEST, "it is about SIZE_BASED_WRAP")
        return
    reader.skip(_CLASSES, "it is about TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP":
        smallest = reader.integer(_SMALLEST, FROM_ZERO, setting=setting)
        if block and (smallest is not None or not reader.has(_SMALLEST)):
            least = _DEFAULT_SMALLEST if smallest is None else smallest
            units = max(1, min(blocks, ceil(least / block)))
            why = f"blocks of {block} elements make units of at least {least}: {units}"
            reader.set_or_default(_SMALLEST, setting, units, why)
        reader.skip(_WRAP, f"{setting} says how many blocks are one unit")
        return
    reader.skip(_SMALLEST, "it is about SIZE_BASED_WRAP")
    if blocks:
        why = "all blocks of a stage are one unit"
        reader.set_or_default(_WRAP, setting, blocks, why)


def _read_prefetch(reader: KeyReader, version: int) -> None:
    """Map both looks ahead to one setting, which holds for forward and for backward."""
    setting = "zero.prefetch"
    if version == 2:
        reader.skip(_BACKWARD, "FSDP 2 does not have it: one unit is gathered ahead")
        reader.only(FORWARD, (False,), "FSDP 2 does not have it", setting=setting)
        return
    forward = reader.flag(FORWARD, setting=setting)
    backward = reader.word(_BACKWARD, _PREFETCHES, setting=setting)
    if backward is None:
        if forward:
            reader.set(FORWARD, setting, 1, _ONE_AHEAD)
        else:
            reader.skip(FORWARD, "zero.prefetch holds for forward and backward")
        return
    units = max(_PREFETCHES[backward], int(bool(forward)))
    why = _ONE_AHEAD if units else "a unit is gathered when the one before has been computed"
    reader.set(_BACKWARD, setting, units, why)
    reader.skip(FORWARD, "zero.prefetch holds for forward and backward")
