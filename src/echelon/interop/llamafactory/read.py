# SPDX-License-Identifier: Apache-2.0
"""A LLaMA-Factory YAML -> settings. Keys are those of 0.9.5: `src/llamafactory/hparams`.

https://github.com/hiyouga/LLaMA-Factory. What it leaves open is TrainingArguments' own; ranks and
the stage of ZeRO stand in files that it names.
"""

from __future__ import annotations

from echelon.interop.abilities import tool_tables
from echelon.interop.hugging_face.trainer_keys import (
    CHATS,
    KEY,
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
from echelon.interop.ranks import read_degrees, set_sequence_parallel

TABLES = tool_tables("llamafactory")
KEYS = TrainerKeys(
    micro="per_device_train_batch_size",
    default_micro=8,
    steps="gradient_accumulation_steps",
    length="cutoff_len",
    epochs="num_train_epochs",
    schedule="lr_scheduler_type",
    optimizer="optim",
    pure="pure_bf16",
    save="save_steps",
    log="logging_steps",
)
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
ADAPTERS = AdapterKeys(
    rank="lora_rank",
    alpha="lora_alpha",
    targets="lora_target",
    dropout="lora_dropout",
    rslora="use_rslora",
    folder="adapter_name_or_path",
    default_rank=8,
)
EP = "expert_model_parallel_size"


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every key of a LLaMA-Factory YAML."""
    read_model_name(reader, "model_name_or_path", context)
    degrees = read_degrees(reader, DEGREES)
    ep = reader.take(EP, "mesh.ep", COUNT, "shares of the experts") or 1
    context = context.with_degrees(**degrees, ep=ep)
    file = DeepSpeedFile.of(reader)
    stage = _read_sharding(reader, degrees["tp"], file)
    data = read_training(reader, KEYS, context, stage=stage)
    _read_recompute(reader)
    _read_method(reader)
    finish_trainer(reader, TABLES, KEYS, file, data, context)


def _read_sharding(reader: KeyReader, tp: int, file: DeepSpeedFile | None) -> int:
    """Map what data ranks share out; where the stage stands in a file that is not here, say so."""
    key = "use_distributed_optimizer"
    stage = int(bool(reader.flag(key, setting="zero.stage")))
    if file is None:
        reader.set_or_default(key, "zero.stage", stage, "1: optimizer state is shared out")
    else:
        reader.skip(key, "deepspeed says what is shared out")
        stage = file.stage
    for key in ("deepspeed", "fsdp", "fsdp_config"):
        if reader.has(key) and (file is None or key != KEY):
            reader.assume(
                f"zero.stage = {stage}: {key} = {reader.text(key)} says it, and is imported by "
                "itself; --set zero.stage=N and mesh.dp_shard=N"
            )
            reader.skip(key, "import that file for its stage: it changes no number")
    key = "sequence_parallel"
    on = bool(reader.flag(key, setting="mesh.sequence_parallel"))
    set_sequence_parallel(reader, key, on, tp)
    return stage


def _read_method(reader: KeyReader) -> None:
    """Map what is trained, and which tokens count: answers alone in supervised fine-tuning."""
    key, why = "stage", "answers count in supervised fine-tuning, nothing is preferred"
    given = reader.given.get(key)
    if given == "sft":
        reader.only("mask_history", (False,), "each answer of a chat counts")
        reader.only("train_on_prompt", (False,), "prompts do not count")
        reader.set(key, "data.train_on", "answers", why)
        reader.known[key] = None
        reader.assume(CHATS)
    else:
        reader.only(key, ("pt",), why)
        reader.skip("mask_history", "every token is predicted")
        reader.only("train_on_prompt", (True,), "every token is predicted")
    key = "finetuning_type"
    if reader.given.get(key, "lora") != "lora":
        reader.only(key, ("full",), "all weights are trained, or adapters of [lora]")
        ADAPTERS.skip(reader, "it is about finetuning_type = lora")
        return
    reader.skip(key, "[lora] says it")
    read_adapters(reader, ADAPTERS)


def _read_recompute(reader: KeyReader) -> None:
    key, off = "recompute_granularity", "disable_gradient_checkpointing"
    setting = "recompute.policy"
    if reader.has(key):
        reader.take(key, setting, {"full": "full"}, "blocks keep their input only")
        reader.skip(off, f"{key} says it")
        return
    value = "none" if reader.flag(off, setting=setting) else "full"
    reader.set_or_default(off, setting, value, "it checkpoints every block, unless told not to")
