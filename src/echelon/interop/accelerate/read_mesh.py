# SPDX-License-Identifier: Apache-2.0
"""The mesh of an Accelerate YAML: its degrees, and how many ranks read different samples.

`cp_size` ranks gather keys and values, or pass them on with an all-to-all by one place at a time,
which is a ring; `sp_size` ranks exchange heads, as DeepSpeed does. Only one of the two may be
above 1. Accelerate 1.15, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from echelon.interop.abilities import by_word
from echelon.interop.accelerate.abilities import NAMES, TABLES
from echelon.interop.deepspeed.abilities import EXCHANGE
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.ranks import DEGREES as DEGREE_WORDS
from echelon.interop.ranks import data_ranks_from_launcher, set_data_mesh

TABLE, MEGATRON_TABLE = "parallelism_config", "megatron_lm_config"
DEGREES = {"tp_size": "tp", "dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard"}
CP, SP, STRATEGY = (f"{TABLE}.{TABLE}_{key}" for key in ("cp_size", "sp_size", "cp_comm_strategy"))
STRATEGIES = dict(sorted(by_word(NAMES.context_kinds).items()))


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
    if reader.flag(key, setting="mesh.sequence_parallel") and degrees["tp"] > 1:
        reader.set(key, "mesh.sequence_parallel", True, "norms and residuals are cut too")
    else:
        reader.skip(key, "norms and residuals are whole")
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
    word = reader.word(STRATEGY, STRATEGIES, setting="context.kind")
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
            kind, why = STRATEGIES[word or "allgather"], "how pieces of a sequence meet"
            reader.set_or_default(STRATEGY, "context.kind", kind, why)
    reader.judge(TABLES.keys["context"], f"{TABLE}.{TABLE}_")
    return cp
