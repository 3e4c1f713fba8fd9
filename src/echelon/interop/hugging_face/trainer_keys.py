# SPDX-License-Identifier: Apache-2.0
"""What trainers on top of Hugging Face's Trainer have alike: batch, numbers, schedule, course.

https://huggingface.co/docs/transformers/main_classes/trainer: TrainingArguments, and its defaults.
Its mixed precision is autocast: what is computed is half, what is kept and summed is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.choices.optimizers import PLAIN_OPTIMIZER
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import BETA, COUNT, FRACTION, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.ranks import (
    DataRanks,
    data_ranks_from_launcher,
    set_batch,
    set_data_mesh,
    set_dtypes,
    shards_of_experts,
)

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
_RATE = 5e-5  # learning rate, in TrainingArguments
_SEED = 42  # in TrainingArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerKeys:
    """Name the keys of a trainer that another calls otherwise."""

    micro: str
    """Sequences of a forward pass of a rank."""
    default_micro: int
    """How many they are where nothing is said."""
    steps: str
    """Forward passes before an update."""
    length: str
    """Tokens of a sequence."""
    epochs: str
    """How often all data is read."""
    schedule: str
    """Kind of the learning rate's schedule."""
    optimizer: str
    """Kind of the optimizer."""
    pure: str
    """Says that parameters are half all the time."""
    save: str
    """Steps between checkpoints."""
    log: str
    """Steps between lines that are logged."""


def read_course(reader: KeyReader, keys: TrainerKeys, context: ImportContext) -> int | None:
    """Map how long a run is, how often it says and saves; return its steps where they are known."""
    steps = reader.integer("max_steps", setting="train.steps")
    if steps is not None and steps > 0:
        reader.set("max_steps", "train.steps", steps, "optimizer steps")
        reader.skip(keys.epochs, "max_steps says it")
    elif "train.steps" in context.keys_named:
        reader.skip_all(("max_steps", keys.epochs), "train.steps says it")
        steps = None
    else:
        why = "a run counts optimizer steps, and how many an epoch has its data says"
        reader.skip("max_steps", "-1: epochs are counted")
        if reader.has(keys.epochs):
            reader.refuse(keys.epochs, why, suggestions=("--set train.steps=N",))
        steps = None
    reader.take(keys.log, "observe.log_every", COUNT, "steps between step lines")
    every = reader.given.get(keys.save)
    if isinstance(every, int) and every > 0:
        reader.take(keys.save, "checkpoint.every", COUNT, "steps between checkpoints")
    else:
        reader.skip(keys.save, "checkpoint.every counts whole steps")
    reader.take("seed", "train.seed", FROM_ZERO, "of first weights and sample order", default=_SEED)
    reader.take(keys.length, "batch.sequence_length", COUNT, "tokens of a sequence")
    return steps


def read_batch(
    reader: KeyReader, keys: TrainerKeys, stage: int, groups: int, context: ImportContext
) -> int:
    """Map the data ranks and the batch; return how many ranks read different samples."""
    data: DataRanks | None = data_ranks_from_launcher(reader, context)
    if data is None:
        return 1
    if data.count % groups:
        message = f"{data.count} data ranks are not {groups} copies of what is shared out"
        reader.conflict(message, "mesh.dp_replicate", data.source)
        groups = 1
    data = replace(data, groups=groups, shards=shards_of_experts(context))
    set_data_mesh(reader, stage, data)
    sizes = [reader.integer(key, COUNT, setting="batch") for key in (keys.micro, keys.steps)]
    named = "batch.microbatch_sequences" in context.keys_named
    if not reader.has(keys.micro) and not named:
        sizes[0] = keys.default_micro
    set_batch(
        reader, ("(batch)", keys.micro, keys.steps), (None, *sizes), data.count, context.microbatch
    )
    if reader.has(keys.steps):
        reader.take_part(keys.steps, "microbatches of a step: the global batch has them")
    return data.count


def halves_on(reader: KeyReader) -> dict[str, bool]:
    """Return whether autocast is to each half."""
    return {key: reader.given.get(key) in (True, "auto", "true") for key in ("bf16", "fp16")}


def read_precision(reader: KeyReader, keys: TrainerKeys, *, sharded: bool) -> None:
    """Map what is computed in: autocast keeps fp32, and FSDP sums in half."""
    on = halves_on(reader)
    for key, is_on in on.items():
        if not is_on:
            reader.only(key, (False, "false"), "off", setting="precision.parameters")
    if all(on.values()):
        reader.conflict("bf16 and fp16", "precision.parameters", reader.where(*on))
        return
    if reader.flag(keys.pure, setting="precision.parameters"):
        set_dtypes(reader, keys.pure, "bf16", "bf16", "bf16", "bf16")
        return
    reader.skip(keys.pure, "off")
    key = next((key for key, is_on in on.items() if is_on), None)
    half = key or "fp32"
    set_dtypes(reader, key or "bf16", half, "fp32", half if sharded else "fp32", "fp32")
    if half == "fp16":
        reader.set("fp16", "precision.loss_scaling", "dynamic", "GradScaler")


def read_optimizer(reader: KeyReader, keys: TrainerKeys) -> None:
    """Map AdamW and what it is given; another optimizer is refused."""
    why = "AdamW, whose state is not quantised, is the update"
    if reader.only(keys.optimizer, ADAMW, why, setting="optimizer.kind"):
        reader.set_or_default(keys.optimizer, "optimizer.kind", PLAIN_OPTIMIZER, why)
    for key, setting, kind, default in (
        ("learning_rate", "learning_rate", POSITIVE, _RATE),
        ("adam_beta1", "beta1", BETA, 0.9),
        ("adam_beta2", "beta2", BETA, 0.999),
        ("adam_epsilon", "eps", POSITIVE, 1e-8),
        ("weight_decay", "weight_decay", NUMBER, 0.0),
    ):
        reader.take(key, f"optimizer.{setting}", kind, "of the optimizer", default=default)
    key = "max_grad_norm"
    limit = reader.number(key, setting="optimizer.clip_norm")
    limit = 1.0 if limit is None else limit
    reader.set_or_default(key, "optimizer.clip_norm", limit or "none", "largest norm")


def read_schedule(reader: KeyReader, keys: TrainerKeys, steps: int | None) -> None:
    """Map the schedule, and its rise: a part of the run, or steps."""
    key = keys.schedule
    word = reader.take(key, "optimizer.schedule", SCHEDULES, "after the rise", default="linear")
    if word != "constant":
        why = "it falls to 0"
        reader.set(key, "optimizer.final_ratio", 0.0, why, source=reader.default)
    ratio, count, setting = "warmup_ratio", "warmup_steps", "optimizer.warmup_steps"
    rise = reader.number(count, setting=setting)
    part = reader.number(ratio, FRACTION, setting=setting)
    if rise is not None and 0 < rise < 1:  # Newer ones take a part of the run here, too.
        part, ratio, rise = rise, count, None
    if rise is not None:
        reader.set(count, setting, int(rise), "steps of the rise")
        reader.skip("warmup_ratio", f"{count} says it")
    elif part and steps is None:
        reader.refuse(ratio, "of how many steps is not known", suggestions=(f"--set {setting}=N",))
    elif part and steps is not None:
        reader.set(ratio, setting, int(-(-part * steps // 1)), f"{part} of {steps} steps")
    else:
        reader.skip(ratio, "0 is no rise")
        reader.set(count, setting, 0, "no rise", source=reader.default)
