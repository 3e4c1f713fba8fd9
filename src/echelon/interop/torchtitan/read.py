# SPDX-License-Identifier: Apache-2.0
"""A torchtitan configuration (TOML) -> settings. Keys are those of 0.2.2, and older.

https://github.com/pytorch/torchtitan: config/job_config.py. Its mesh is pp x dp_replicate
x dp_shard x cp x tp as here; what data and context ranks share out is FSDP 2, which is stage 3.
`read_pipeline.py` reads the stages, `read_numbers.py` what changes numbers.
"""

from __future__ import annotations

from echelon.config.entries import flatten
from echelon.config.presets import read_preset
from echelon.config.settings.value_types import Integer, Text
from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, KeyReader
from echelon.interop.ranks import (
    assume_fewest_ranks,
    data_ranks_from_launcher,
    read_degrees,
    read_expert_degrees,
    set_offload,
)
from echelon.interop.torchtitan.abilities import NAMES, TABLES
from echelon.interop.torchtitan.flavors import FLAVORS, Flavor
from echelon.interop.torchtitan.read_numbers import (
    read_batch,
    read_learning_rate,
    read_optimizer,
    read_precision,
)
from echelon.interop.torchtitan.read_pipeline import read_pipeline

TABLE = "parallelism"
TP, PP, CP = (f"{TABLE}.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
REPLICATE, SHARD = (f"{TABLE}.data_parallel_{what}_degree" for what in ("replicate", "shard"))
EP, ETP = f"{TABLE}.expert_parallel_degree", f"{TABLE}.expert_tensor_parallel_degree"
_ROTATE = f"{TABLE}.context_parallel_rotate_method"
_ROTATIONS = dict(sorted(by_word(NAMES.context_kinds).items()))
_RESHARD = f"{TABLE}.fsdp_reshard_after_forward"
OFFLOAD = "training.enable_cpu_offload"
_LEFT_OVER = Integer(minimum=-1)


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
