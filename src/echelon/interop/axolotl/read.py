# SPDX-License-Identifier: Apache-2.0
"""An Axolotl YAML -> settings. Keys are those of 0.13: `src/axolotl/utils/schemas`.

https://docs.axolotl.ai/docs/config-reference.html. What it leaves open is TrainingArguments' own;
ranks are those of its launcher: dp_replicate x dp_shard x tp x cp.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import cast

from echelon.interop.abilities import tool_tables
from echelon.interop.hugging_face.trainer_keys import (
    CHATS,
    AdapterKeys,
    DeepSpeedFile,
    TrainerKeys,
    finish_trainer,
    read_adapters,
    read_model_name,
    read_training,
)
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.ranks import ALWAYS_OR_NEVER, read_degrees, set_offload

TABLES = tool_tables("axolotl")
KEYS = TrainerKeys(
    micro="micro_batch_size",
    default_micro=1,
    steps="gradient_accumulation_steps",
    length="sequence_len",
    epochs="num_epochs",
    schedule="lr_scheduler",
    optimizer="optimizer",
    pure="bfloat16",
    save="save_steps",
    log="logging_steps",
)
ADAPTERS = AdapterKeys(
    rank="lora_r",
    alpha="lora_alpha",
    targets="lora_target_modules",
    dropout="lora_dropout",
    rslora="peft_use_rslora",
    folder="lora_model_dir",
    every="lora_target_linear",
)
TP, CP, EP = "tensor_parallel_size", "context_parallel_size", "expert_parallel_size"
SHARD, REPLICATE = "dp_shard_size", "dp_replicate_size"
_OFFLOAD = ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
_KEPT = ("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward")


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every key of an Axolotl YAML."""
    reader.sections(TABLES.sections)
    read_model_name(reader, "base_model", context)
    degrees = {"pp": 1, **read_degrees(reader, {"tp": TP, "cp": CP})}
    if degrees["cp"] > 1:
        reader.set(CP, "context.kind", "ring", "pieces of a sequence meet in a ring")
    ep = reader.take(EP, "mesh.ep", COUNT, "shares of the experts") or 1
    context = context.with_degrees(**degrees, ep=ep)
    file = DeepSpeedFile.of(reader)
    stage = _read_sharding(reader, file)
    context, groups = _read_ranks(reader, context)
    data = read_training(reader, KEYS, context, stage=stage, groups=groups, sharded=stage > 0)
    _read_packing(reader)
    _read_method(reader)
    key = "gradient_checkpointing"
    if (on := reader.given.get(key)) is not None:
        value = "full" if on not in (False, "false") else "none"
        reader.set(key, "recompute.policy", value, "blocks keep their input only, or everything")
        reader.known[key] = None
    finish_trainer(reader, TABLES, KEYS, file, data, context)


def _read_sharding(reader: KeyReader, file: DeepSpeedFile | None) -> int:
    """Map what data ranks share out: FSDP, or what a file of DeepSpeed's says."""
    if file is not None:
        return file.stage
    fsdp = bool(reader.keys_of("fsdp_config") or reader.has("fsdp")) or reader.has(SHARD)
    stage = 3 if fsdp else 0
    key = next(iter(reader.keys_of("fsdp_config")), SHARD)
    reader.set_or_default(key, "zero.stage", stage, "FSDP shares parameters out, else nothing is")
    if reader.has("deepspeed"):
        reader.assume(
            f"zero.stage = {stage}: deepspeed = {reader.text('deepspeed')} says it, and is "
            "imported by itself; --set zero.stage=N and mesh.dp_shard=N"
        )
        reader.skip("deepspeed", "import that file for its stage: it changes no number")
    for key in _OFFLOAD:
        on = reader.flag(key, setting="zero.parameter_offload")
        set_offload(reader, key, on, "where slices rest between uses")
    for key in _KEPT:
        why = "whether a unit is gathered again for backward"
        reader.take(key, "zero.reshard_after_forward", ALWAYS_OR_NEVER, why)
    return stage


def _read_ranks(reader: KeyReader, context: ImportContext) -> tuple[ImportContext, int]:
    """Return the context with the ranks that the degrees tell, and copies of what is shared out."""
    sizes = {key: reader.integer(key, COUNT, setting="mesh") for key in (REPLICATE, SHARD)}
    groups = sizes[REPLICATE] or 1
    for key in sizes:
        reader.take_part(key, "mesh.dp_replicate and mesh.dp_shard, together with the ranks")
    if sizes[SHARD] is None:
        return context, groups
    ranks = prod(size or 1 for size in sizes.values()) * context.model_ranks
    if context.ranks not in (None, ranks):
        reader.conflict(
            f"the degrees are those of {ranks} ranks, but --ranks {context.ranks}",
            "mesh",
            f"{reader.where(REPLICATE, SHARD)}, --ranks {context.ranks}",
        )
    return replace(context, ranks=ranks), groups


def _read_method(reader: KeyReader) -> None:
    """Map what is trained, and which tokens count."""
    key, kinds = "train_on_inputs", _kinds_of_datasets(reader)
    whole = reader.flag(key, setting="data.train_on")
    if kinds == {"completion"}:
        reader.skip(key, "a dataset of text has no prompts: every token is predicted")
    elif whole is not None or "chat_template" in kinds:
        value = "all" if whole else "answers"
        reader.set_or_default(key, "data.train_on", value, "whether prompts count in the loss, too")
        if not whole:
            reader.assume(CHATS)
    known = reader.only("adapter", ("lora",), "all weights are trained, or adapters of [lora]")
    if known and reader.has("adapter"):
        read_adapters(reader, ADAPTERS)
    else:
        ADAPTERS.skip(reader, "it is about adapter")


def _kinds_of_datasets(reader: KeyReader) -> set[str]:
    """Return the types of the datasets that are read."""
    found = reader.given.get("datasets")
    listed = cast("list[object]", found) if isinstance(found, list) else []
    tables = [cast("dict[str, object]", one) for one in listed if isinstance(one, dict)]
    return {str(table.get("type")) for table in tables}


def _read_packing(reader: KeyReader) -> None:
    """Map packing: attention stays inside each document; without it there is one in a sequence."""
    key = "sample_packing"
    if reader.flag(key, setting="batch.documents"):
        reader.set(key, "batch.documents", "separate", "attention stays inside each document")
    else:
        reader.skip(key, "sequences are always full here")
