"""A torchtitan configuration (TOML) -> settings. Keys are those of 0.2.2, and older.

https://github.com/pytorch/torchtitan: config/job_config.py. Its mesh is pp x dp_replicate
x dp_shard x cp x tp as here; what data and context ranks share out is FSDP 2, which is stage 3.
`torchtitan_pipeline.py` and `torchtitan_numbers.py` read the stages and what changes numbers.
"""

from __future__ import annotations

from echelon.config.entries import flatten
from echelon.config.foreign.ledger import COUNT, FROM_ZERO, Ledger
from echelon.config.foreign.ranks import launched_ranks
from echelon.config.foreign.surroundings import Surroundings
from echelon.config.foreign.torchtitan_keys import (
    FLAVORS,
    NOT_NEEDED,
    NOT_NEEDED_TABLES,
    ONLY,
    SECTIONS,
    Flavor,
)
from echelon.config.foreign.torchtitan_numbers import (
    read_batch,
    read_learning_rate,
    read_optimizer,
    read_precision,
)
from echelon.config.foreign.torchtitan_pipeline import read_pipeline
from echelon.config.kinds import Integer, Text
from echelon.config.presets import read_preset
from echelon.core.rulebook.imports import IMPORT_RANKS

TABLE = "parallelism"
TP, PP, CP = (f"{TABLE}.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
REPLICATE, SHARD = (f"{TABLE}.data_parallel_{what}_degree" for what in ("replicate", "shard"))
EP, ETP = f"{TABLE}.expert_parallel_degree", f"{TABLE}.expert_tensor_parallel_degree"
ROTATE = f"{TABLE}.context_parallel_rotate_method"
ROTATIONS = {"allgather": "gathered", "alltoall": "ring"}
RESHARD = f"{TABLE}.fsdp_reshard_after_forward"
OFFLOAD = "training.enable_cpu_offload"
LEFT_OVER = Integer(minimum=-1)


def read_torchtitan(ledger: Ledger, around: Surroundings) -> None:
    """Note in `ledger` what becomes of every key of a torchtitan configuration."""
    ledger.sections(SECTIONS)
    layers = _read_model(ledger, around)
    around = _read_degrees(ledger, around)
    replicate, shard = _read_data_ranks(ledger, around)
    _read_sharding(ledger, shard, around)
    data = replicate * shard
    read_batch(ledger, data, pp=around.degrees["pp"])
    read_pipeline(ledger, layers, around)
    read_precision(ledger)
    read_optimizer(ledger)
    read_learning_rate(ledger)
    _read_recompute(ledger)
    _read_run(ledger)
    _read_rest(ledger)
    ledger.finish()


def _read_model(ledger: Ledger, around: Surroundings) -> int | None:
    """Map the model; return its layers where they are known."""
    name, flavor = "model.name", "model.flavor"
    words = [ledger.read(key, Text(), setting="model") for key in (name, flavor)]
    model, size = (str(word) for word in words)
    if (found := FLAVORS.get((model, size))) is not None:
        _set_flavor(ledger, flavor, found, f"{model} {size}")
        ledger.skip(name, f"together with {flavor}")
        return _layers_of(found.preset)
    if around.model is not None:
        for key in (name, flavor):
            ledger.skip(key, f"no flavor that is known; the run builds on {around.model.name}")
        return around.model.layers
    known = [f'name = "{m}", flavor = "{f}"' for m, f in FLAVORS if m == model] or ["--extends"]
    why = "its sizes stand in the code of torchtitan; --extends MODEL names yours"
    ledger.refuse(flavor, f"of {name} = {ledger.text(name)}: {why}", works=known)
    return None


def _set_flavor(ledger: Ledger, key: str, flavor: Flavor, what: str) -> None:
    """Map a flavor to a preset, and to what it has otherwise."""
    ledger.set(key, "model.preset", flavor.preset, what)
    if flavor.name:
        ledger.set(key, "model.name", flavor.name, "the preset with what torchtitan has otherwise")
    for setting, value in flavor.changes.items():
        ledger.set(key, setting, value, f"of {what}, in the code of torchtitan")
    length = ledger.given.get("training.seq_len")
    if flavor.longest is not None and isinstance(length, int) and length > flavor.longest:
        why = f"positions beyond {flavor.longest} are stretched as YaRN does, and here they are not"
        works = (f"training.seq_len = {flavor.longest}",)
        ledger.refuse(key, why, works=works, setting="batch.sequence_length")


def _layers_of(preset: str) -> int | None:
    found = read_preset("models", preset)
    layers = dict(flatten(found.tables)).get("model.layers") if found else None
    return layers if isinstance(layers, int) else None


def _read_degrees(ledger: Ledger, around: Surroundings) -> Surroundings:
    degrees = {"tp": 1, "pp": 1, "cp": 1}
    whys = {"tp": "pieces of a matrix", "pp": "pipeline stages", "cp": "pieces of a sequence"}
    for axis, key in (("tp", TP), ("pp", PP), ("cp", CP)):
        if (degree := ledger.whole(key, COUNT, setting=f"mesh.{axis}")) is not None:
            ledger.set(key, f"mesh.{axis}", degree, whys[axis])
            degrees[axis] = degree
    if degrees["tp"] > 1:
        why = "tensor ranks always cut norms and residuals too"
        ledger.set(TP, "mesh.sequence_parallel", True, why, source=ledger.default)
    word = ledger.word(ROTATE, ROTATIONS, setting="context.kind")
    if degrees["cp"] == 1:
        ledger.skip(ROTATE, "a sequence is not cut")
    elif word is not None or not ledger.has(ROTATE):
        kind, source = ROTATIONS[word or "allgather"], "" if word else ledger.default
        ledger.set(ROTATE, "context.kind", kind, "how pieces of a sequence meet", source=source)
    return _read_experts(ledger, around.with_degrees(**degrees))


def _read_experts(ledger: Ledger, around: Surroundings) -> Surroundings:
    ep = ledger.whole(EP, COUNT, setting="mesh.ep")
    pieces = ledger.whole(ETP, COUNT, setting="experts.expert_tp")
    if ep is not None:
        ledger.set(EP, "mesh.ep", ep, "shares of the experts")
    if pieces is not None:
        ledger.set(ETP, "experts.expert_tp", pieces, "pieces of an expert")
    return around.with_degrees(ep=ep or 1, expert_tp=pieces or 1)


def _read_data_ranks(ledger: Ledger, around: Surroundings) -> tuple[int, int]:
    """Map the data ranks; those that share out may be whatever ranks are left."""
    replicate = ledger.whole(REPLICATE, COUNT, setting="mesh.dp_replicate") or 1
    ledger.set(
        REPLICATE,
        "mesh.dp_replicate",
        replicate,
        "copies of what is shared out",
        source="" if ledger.has(REPLICATE) else ledger.default,
    )
    given = ledger.whole(SHARD, LEFT_OVER, setting="mesh.dp_shard")
    model = around.model_ranks
    if given is None or given == -1:
        shard = _left_over(ledger, replicate, around)
        if shard is not None:
            why = f"what is left of the ranks: {shard * replicate * model} / {replicate} x {model}"
            ledger.set(SHARD, "mesh.dp_shard", shard, why)
        return replicate, shard or 1
    if given == 0:
        ledger.refuse(SHARD, "-1 takes what is left of the ranks", works=("-1", "1"))
        return replicate, 1
    if around.ranks not in (None, replicate * given * model):
        ledger.conflict(
            f"{replicate} x {given} data ranks of {model} ranks that hold one model are "
            f"{replicate * given * model} ranks, but --ranks {around.ranks}",
            "mesh.dp_shard",
            f"{ledger.where(REPLICATE, SHARD)}, --ranks {around.ranks}",
            works=(f"--ranks {replicate * given * model}", f"{SHARD} = -1"),
        )
    ledger.set(SHARD, "mesh.dp_shard", given, "data ranks that share out")
    return replicate, given


def _left_over(ledger: Ledger, replicate: int, around: Surroundings) -> int | None:
    if around.ranks is None and around.data_ranks == 1 and "cluster.preset" not in around.told:
        least = around.model_ranks * replicate
        ledger.problems.append(
            IMPORT_RANKS.problem(
                f"{SHARD} = {ledger.text(SHARD)} takes what is left of the ranks, and how many "
                f"are started is not known; one copy of the model takes {around.model_ranks}",
                key="mesh.dp_shard",
                set_by=ledger.path,
                works=(f"--ranks {least}", f"--ranks {2 * least}", f"{SHARD} = 2"),
            )
        )
        return None
    data = launched_ranks(ledger, around)
    if data is None:
        return None
    if data.count % replicate:
        ledger.conflict(
            f"{data.count} data ranks are not {replicate} copies of what is shared out",
            "mesh.dp_replicate",
            f"{ledger.where(REPLICATE)}, {data.source}",
        )
        return None
    return data.count // replicate


def _read_sharding(ledger: Ledger, shard: int, around: Surroundings) -> None:
    """Map FSDP 2, which shares parameters out as soon as there are ranks to share them."""
    reshard = ledger.word(RESHARD, ("default", "always", "never"))
    offload = ledger.flag(OFFLOAD, setting="zero.parameter_offload")
    if shard * around.degrees["cp"] == 1:
        ledger.set(SHARD, "zero.stage", 0, "no ranks share parameters out", source=ledger.default)
        ledger.skip(RESHARD, "parameters are whole on every rank")
        if ledger.only(OFFLOAD, (False,), "parameters are whole on every rank"):
            return
        return
    why = "FSDP 2 shares parameters out over data and context ranks"
    ledger.set(SHARD, "zero.stage", 3, why, source=ledger.where(SHARD, CP))
    pp = around.degrees["pp"]
    word = reshard if reshard in ("always", "never") else ("never" if pp > 1 else "always")
    why = "whether a unit is gathered again for backward; by default unless there is a pipeline"
    source = "" if ledger.has(RESHARD) else ledger.default
    ledger.set(RESHARD, "zero.reshard_after_forward", word, why, source=source)
    if offload is not None:
        for what in ("parameter", "optimizer"):
            home = "host" if offload else "none"
            ledger.set(OFFLOAD, f"zero.{what}_offload", home, "where slices rest between uses")


def _read_recompute(ledger: Ledger) -> None:
    """Map which blocks are redone in backward; a table that is absent leaves it to us."""
    table = "activation_checkpoint"
    mode, option = f"{table}.mode", f"{table}.selective_ac_option"
    setting = "recompute.policy"
    word = ledger.word(mode, ("none", "full", "selective"), setting=setting)
    for key in ledger.keys_of(table):
        if key not in (mode, option):
            ledger.skip(key, "a block is redone from its own input, or not at all")
    if word in ("none", "full"):
        ledger.set(mode, setting, word, "which blocks are redone")
        ledger.skip(option, f"it is about {mode} = selective")
    elif word == "selective":
        every = ledger.given.get(option, "2")
        if not str(every).isdigit() or not int(str(every)):
            why = "which products are kept inside a block is not a setting; whole blocks are redone"
            ledger.refuse(option, why, works=('"2"', f'{mode} = "full"'), setting=setting)
            return
        ledger.set(mode, setting, "full", f"whole blocks, one of {every}")
        why = f"one of {every} blocks: torchtitan starts with block {int(str(every)) - 1}, here 0"
        source = "" if ledger.has(option) else ledger.default
        ledger.set(option, "recompute.every", int(str(every)), why, source=source)
    else:
        ledger.skip(option, f"it is about {mode} = selective")


def _read_run(ledger: Ledger) -> None:
    key = "metrics.log_freq"
    if (every := ledger.whole(key, COUNT, setting="observe.log_every")) is not None:
        ledger.set(key, "observe.log_every", every, "steps between step lines")
    interval, keep = "checkpoint.interval", "checkpoint.keep_latest_k"
    switches = [ledger.flag(f"checkpoint.{name}") for name in ("enable", "enable_checkpoint")]
    for name in ("enable", "enable_checkpoint"):
        ledger.skip(f"checkpoint.{name}", f"{interval} says how often")
    steps = ledger.whole(interval, COUNT, setting="checkpoint.every")
    newest = ledger.whole(keep, FROM_ZERO, setting="checkpoint.keep")
    if any(switches):
        source = "" if ledger.has(interval) else ledger.default
        ledger.set(interval, "checkpoint.every", steps or 500, "steps between", source=source)
        if newest is not None:
            ledger.set(keep, "checkpoint.keep", newest or "all", "newest that stay; 0 is all")
    else:
        for name in (interval, keep):
            ledger.skip(name, "no checkpoint is written")
    _read_validation(ledger)


def _read_validation(ledger: Ledger) -> None:
    old, freq, steps = (f"validation.{name}" for name in ("enabled", "freq", "steps"))
    switch = old if ledger.has(old) else "validation.enable"
    on = ledger.flag(switch, setting="train.validate_every")
    every = ledger.whole(freq, COUNT, setting="train.validate_every")
    count = ledger.whole(steps, LEFT_OVER, setting="train.validation_batches")
    if not on:
        for key in (switch, freq, steps):
            ledger.skip(key, "nothing is validated")
        return
    ledger.skip(switch, f"{freq} says how often")
    source = "" if ledger.has(freq) else ledger.default
    ledger.set(freq, "train.validate_every", every or 10, "steps between", source=source)
    if count is not None and count > 0:
        ledger.set(steps, "train.validation_batches", count, "global batches of a validation")
    else:
        ledger.skip(steps, "-1 is all of it; train.validation_batches says how many")


def _read_rest(ledger: Ledger) -> None:
    for key, why in NOT_NEEDED.items():
        ledger.skip(key, why)
    for key, (allowed, why) in ONLY.items():
        ledger.only(key, allowed, why)
    ledger.only("fault_tolerance.enable", (False,), "a run that stops is started by --resume")
    ledger.skip_table("fault_tolerance", "fault_tolerance.enable is false")
    for table, why in NOT_NEEDED_TABLES.items():
        keys = [key for key in ledger.keys_of(table) if key not in ledger.known]
        for key in keys:
            ledger.skip(key, why)
        ledger.know_table(table)
