"""An Accelerate YAML -> settings: FSDP 1 and 2, DeepSpeed, plain data parallelism. Accelerate 1.15.

https://huggingface.co/docs/accelerate/usage_guides/fsdp. Its truth values may be strings, and may
be any of those of YAML 1.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.config.foreign.accelerate_context import TABLE, read_context
from echelon.config.foreign.accelerate_deepspeed import TABLE as PLUGIN
from echelon.config.foreign.accelerate_deepspeed import read_plugin, read_stage
from echelon.config.foreign.accelerate_keys import (
    FSDP_NOT_NEEDED,
    FSDP_ONLY,
    NOT_NEEDED,
    OFF_TABLES,
    ONLY,
    OTHER_TYPES,
    PLAIN_TYPES,
    SECTIONS,
    TPU_KEYS,
)
from echelon.config.foreign.accelerate_units import read_units
from echelon.config.foreign.ledger import COUNT, Ledger
from echelon.config.foreign.ranks import launched_ranks, set_data_mesh
from echelon.config.foreign.surroundings import Surroundings
from echelon.core.rulebook.imports import IMPORT_KIND

FSDP = "fsdp_config"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
TRUE, FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")
DEGREES = {"tp_size": "tp", "dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard"}


def read_accelerate(ledger: Ledger, around: Surroundings) -> None:
    """Note in `ledger` what becomes of every key of an Accelerate configuration."""
    ledger.given = _plain(ledger.given)
    ledger.sections(SECTIONS)
    kind = _read_type(ledger)
    if kind is None:
        return
    version = _read_version(ledger)
    degrees = _read_degrees(ledger, around)
    if kind == "NO" and around.ranks is None and not ledger.has("num_processes"):
        around = replace(around, ranks=1)
    around = around.with_degrees(**{k: v for k, v in degrees.items() if k in ("tp", "cp")})
    _read_precision(ledger, kind)
    stage, hybrid = _stage_of(ledger, kind, version)
    data = _read_ranks(ledger, stage, hybrid, degrees, around)
    if kind == "DEEPSPEED":
        read_plugin(ledger, data, around)
    else:
        ledger.refuse_table(PLUGIN, "distributed_type is not DEEPSPEED")
    if kind == "FSDP":
        read_units(ledger, stage, version, around)
        _read_recompute(ledger)
    else:
        ledger.skip_table(FSDP, "distributed_type is not FSDP")
    _read_rest(ledger)
    ledger.finish()


def _stage_of(ledger: Ledger, kind: str, version: int) -> tuple[int, bool]:
    """Return the stage of ZeRO, and whether each machine has a copy of what is shared out."""
    if kind == "FSDP":
        return _read_strategy(ledger, version)
    return (read_stage(ledger), False) if kind == "DEEPSPEED" else (0, False)


def _plain(given: Mapping[str, object]) -> dict[str, object]:
    """Return the keys with truth values and numbers in strings as what they mean."""
    plain: dict[str, object] = {}
    for key, value in given.items():
        table, _, name = key.rpartition(".")
        # Its launcher takes names in fsdp_config without their prefix too.
        full = f"{FSDP}.fsdp_{name}" if table == FSDP and not name.startswith("fsdp") else key
        plain[full] = _meant(value) if full != "mixed_precision" else value
    # YAML 1.1 reads the word no as false.
    if plain.get("mixed_precision") is False:
        plain["mixed_precision"] = "no"
    return plain


def _meant(value: object) -> object:
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


def _read_type(ledger: Ledger) -> str | None:
    """Return how Accelerate would train; None where the file is not to be read as a whole."""
    key = "distributed_type"
    ledger.known[key] = None
    # YAML 1.1 reads the word NO as false.
    kind = "NO" if ledger.given.get(key) is False else str(ledger.given.get(key))
    if kind in ("FSDP", "DEEPSPEED") or kind in PLAIN_TYPES:
        ledger.skip(key, PLAIN_TYPES.get(kind, "zero.stage follows from its table"))
        return kind
    why = OTHER_TYPES.get(kind, "there is no such type")
    ledger.problems.append(
        IMPORT_KIND.problem(
            f"{key} = {ledger.text(key)}: {why}",
            key=key,
            set_by=ledger.where(key),
            works=("FSDP", "DEEPSPEED", *PLAIN_TYPES),
        )
    )
    return None


def _read_version(ledger: Ledger) -> int:
    key = f"{FSDP}.fsdp_version"
    if ledger.only(key, (1, 2), "one engine; it says how the other keys are meant"):
        version = ledger.given.get(key)
        return version if isinstance(version, int) else 1
    return 1


def _read_degrees(ledger: Ledger, around: Surroundings) -> dict[str, int]:
    """Map parallelism_config but for the data ranks, and return all its degrees."""
    degrees: dict[str, int] = {}
    for name, axis in DEGREES.items():
        key = f"{TABLE}.{TABLE}_{name}"
        if (degree := ledger.whole(key, COUNT, setting=f"mesh.{axis}")) is None:
            continue
        degrees[axis] = degree
        if axis == "tp":
            ledger.set(key, f"mesh.{axis}", degree, "ranks that hold one model together")
        else:
            ledger.skip(key, f"mesh.{axis}, together with num_processes")
    if (cp := read_context(ledger)) is not None:
        degrees["cp"] = cp
    return degrees


def _read_strategy(ledger: Ledger, version: int) -> tuple[int, bool]:
    """Map what is shared out; return the stage, and whether each machine has a copy."""
    old, new = f"{FSDP}.fsdp_sharding_strategy", f"{FSDP}.fsdp_reshard_after_forward"
    setting = "zero.reshard_after_forward"
    if version == 2:
        ledger.skip(old, "FSDP 2 has fsdp_reshard_after_forward instead")
        kept = ledger.flag(new, setting=setting)
        source = "" if ledger.has(new) else ledger.default
        ledger.set(new, "zero.stage", 3, "FSDP 2 shares out parameters too", source=source)
        if kept is None and ledger.has(new):
            return 3, False
        word = "never" if kept is False else "always"
        ledger.set(new, setting, word, "whether a unit is gathered again", source=source)
        return 3, False
    key = old if ledger.has(old) or not ledger.has(new) else new
    ledger.skip(new if key == old else old, f"{key} says it")
    value = ledger.given.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(STRATEGIES):
        name: str | None = STRATEGIES[value - 1]
    else:
        name = ledger.word(key, STRATEGIES, setting="zero.stage")
    source = "" if ledger.has(key) else ledger.default
    if name is None:
        if ledger.has(key):
            return 3, False
        name = "FULL_SHARD"
    if name == "NO_SHARD":
        ledger.set(key, "zero.stage", 0, "gradients are all-reduced", source=source)
        return 0, False
    ledger.set(key, "zero.stage", 3, "slices of parameters rest between steps", source=source)
    kept = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    why = "whole from forward to the end of backward" if kept else "gathered again for backward"
    ledger.set(key, setting, "never" if kept else "always", why, source=source)
    return 3, name.startswith("HYBRID")


def _read_ranks(
    ledger: Ledger, stage: int, hybrid: bool, degrees: Mapping[str, int], around: Surroundings
) -> int:
    """Map the data ranks to the mesh, copy by copy of what is shared out; return how many."""
    key = "num_processes"
    ranks = ledger.whole(key, COUNT, setting="mesh.dp_shard")
    machines = ledger.whole("num_machines", COUNT) or 1
    if ranks is not None and around.ranks not in (None, ranks):
        ledger.conflict(
            f"{key} = {ranks}, but --ranks {around.ranks}",
            "mesh.dp_shard",
            f"{ledger.where(key)}, --ranks {around.ranks}",
        )
        return 1
    known = around if ranks is None else replace(around, ranks=ranks)
    data = launched_ranks(ledger, known)
    if data is None:
        return 1
    if ranks is not None:
        data = replace(data, source=ledger.where(key), key=key)
    groups = degrees.get("dp_replicate", machines if hybrid else 1)
    count = data.count
    if count % groups or degrees.get("dp_shard", count // groups) * groups != count:
        ledger.conflict(
            f"{count} data ranks are not {groups} copies"
            + (f" of {degrees['dp_shard']} ranks that share out" if "dp_shard" in degrees else ""),
            "mesh.dp_shard",
            data.source,
            works=[f"num_processes = {groups * degrees.get('dp_shard', 1) * around.model_ranks}"],
        )
        return count
    set_data_mesh(ledger, stage, replace(data, groups=groups))
    ledger.skip("num_machines", "ranks on one machine are neighbours; the launcher places them")
    return count


def _read_precision(ledger: Ledger, kind: str) -> None:
    """Map mixed_precision: what FSDP computes and sends is half, what it keeps is fp32.

    DeepSpeed accumulates in half, too, and keeps a copy in fp32 that its optimizer updates.
    """
    key = "mixed_precision"
    word = ledger.word(key, ("no", "fp16", "bf16", "fp8"), setting="precision.parameters")
    if word == "fp8":
        why = "nothing is computed in 8 bits"
        ledger.refuse(key, why, works=('"bf16"',), setting="precision.parameters")
        return
    if word is None and ledger.has(key):
        return
    source = "" if ledger.has(key) else ledger.default
    half = word if word in ("fp16", "bf16") else "fp32"
    sent = "fp32" if kind in PLAIN_TYPES else half
    added = half if kind == "DEEPSPEED" else "fp32"
    for role, dtype, why in (
        ("parameters", half, "in forward and backward"),
        ("gradients", added, "as they accumulate"),
        ("reduction", sent, "as they are summed over ranks"),
        ("master", "fp32", "what the optimizer updates"),
    ):
        ledger.set(key, f"precision.{role}", dtype, why, source=source)
    if word == "fp16":
        why = "GradScaler, as Accelerate makes it"
        for name, value in (
            ("loss_scaling", "dynamic"),
            ("loss_scale", 65536.0),
            ("loss_scale_window", 2000),
            ("loss_scale_hysteresis", 1),
        ):
            ledger.set(key, f"precision.{name}", value, why)


def _read_recompute(ledger: Ledger) -> None:
    key, offload = (f"{FSDP}.fsdp_activation_checkpointing{end}" for end in ("", "_offload"))
    on = ledger.flag(key, setting="recompute.policy")
    if on is not None:
        why = "blocks keep their input only" if on else "every block keeps what backward needs"
        ledger.set(key, "recompute.policy", "full" if on else "none", why)
    host = ledger.flag(offload, setting="recompute.offload")
    if host is not None:
        ledger.set(offload, "recompute.offload", "host" if host else "none", "of stored inputs")


def _read_rest(ledger: Ledger) -> None:
    for key, why in {**NOT_NEEDED, **FSDP_NOT_NEEDED}.items():
        ledger.skip(key, why)
    for key in TPU_KEYS:
        ledger.only(key, (False,), "there is no TPU")
    for key, (allowed, why) in {**ONLY, **FSDP_ONLY}.items():
        ledger.only(key, allowed, why)
    for table, why in OFF_TABLES.items():
        ledger.refuse_table(table, why)
    key = "dynamo_config.dynamo_backend"
    for name in (key, "dynamo_backend"):
        if ledger.only(name, (False, "NO", "no"), "nothing is compiled"):
            ledger.skip_table("dynamo_config", "nothing is compiled")
