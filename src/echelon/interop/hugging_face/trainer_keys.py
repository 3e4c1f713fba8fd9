# SPDX-License-Identifier: Apache-2.0
"""What trainers on top of Hugging Face's Trainer have alike: model, batch, numbers, adapters.

A JSON of DeepSpeed that such a trainer names is read here, too: what is "auto" in it is the
Trainer's own, and where both say a number the Trainer compares them.

https://huggingface.co/docs/transformers/main_classes/trainer: TrainingArguments, and its defaults.
Its mixed precision is autocast: what is computed is half, what is kept and summed is fp32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from echelon.config.presets import preset_names
from echelon.core.choices.lora import ALL_LINEAR, LINEARS, LORA_LINEARS
from echelon.core.choices.optimizers import PLAIN_OPTIMIZER
from echelon.interop.abilities import ToolTables
from echelon.interop.deepspeed.abilities import TABLES
from echelon.interop.deepspeed.read import BATCH, read_engine, read_stage
from echelon.interop.deepspeed.read_numbers import read_precision
from echelon.interop.followed import adopt, inner_reader
from echelon.interop.import_context import ImportContext, import_context
from echelon.interop.key_reader import (
    AUTO,
    BETA,
    COUNT,
    FRACTION,
    FROM_ZERO,
    NUMBER,
    POSITIVE,
    KeyReader,
    json_text,
)
from echelon.interop.ranks import (
    DataRanks,
    data_ranks_from_launcher,
    set_batch,
    set_data_mesh,
    set_dtypes,
    shards_of_experts,
)
from echelon.interop.torchtitan.abilities import FLAVORS, Flavor

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
CHATS = "data.source is a file of chats: --set data.source=CHATS.jsonl --set data.tokenizer=FOLDER"
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
_RATE = 5e-5  # learning rate, in TrainingArguments
_SEED = 42  # in TrainingArguments

_LAYERS = {
    **{f"{name}_proj": name for name in LINEARS},
    "q_a_proj": "q_down",
    "kv_a_proj_with_mqa": "kv_down",
    "q_b_proj": "q_up",
    "kv_b_proj": "kv_up",
}
"""Our name of each layer of transformers, those of latent attention behind the others."""
_EVERY = ("all", ALL_LINEAR)

_TAIL = re.compile(r"-(instruct|base|chat|hf|it|thinking|v0\.\d|\d{4})(?=-|$)")
WEIGHTS = "train.weights"


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


def read_training(
    reader: KeyReader,
    keys: TrainerKeys,
    context: ImportContext,
    *,
    stage: int,
    groups: int = 1,
    sharded: bool = False,
) -> int:
    """Map data ranks, batch, numbers and course; return how many ranks read different samples."""
    data = read_batch(reader, keys, stage, groups, context)
    read_autocast(reader, keys, sharded=sharded)
    read_adamw(reader, keys)
    read_schedule(reader, keys, read_course(reader, keys, context))
    return data


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


def read_autocast(reader: KeyReader, keys: TrainerKeys, *, sharded: bool) -> None:
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


def read_adamw(reader: KeyReader, keys: TrainerKeys) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKeys:
    """Name the keys of a trainer that say what adapters are like."""

    rank: str
    """Their width."""
    alpha: str
    """They are scaled by this over the width."""
    targets: str
    """Which layers have one: a list, or words with commas."""
    dropout: str
    """Of what an adapter reads."""
    rslora: str
    """Whether the scale is over the root of the width."""
    folder: str = ""
    """The folder that they begin as, of PEFT; "": there is no such key."""
    every: str = ""
    """Whether each linear layer has one; "": there is no such key."""
    default_rank: int | None = None
    """The width where none is given, of which the scale is twice; None: both must be."""

    def skip(self, reader: KeyReader, why: str) -> None:
        """Say why these keys need no setting: there are no adapters."""
        names = (self.rank, self.alpha, self.targets, self.dropout, self.rslora)
        names += (self.folder, self.every)
        reader.skip_all([name for name in names if name], why)


def read_adapters(reader: KeyReader, keys: AdapterKeys) -> None:
    """Map adapters over a frozen model; what they are is asked for where nothing says it."""
    rank = reader.integer(keys.rank, COUNT, setting="lora.rank") or keys.default_rank
    if rank is None:
        reader.refuse(keys.rank, "adapters have a width", suggestions=(f"{keys.rank}: 8",))
    else:
        reader.set_or_default(keys.rank, "lora.rank", rank, "width of adapters")
    alpha = reader.number(keys.alpha, setting="lora.alpha")
    if alpha is None and rank is not None and keys.default_rank is not None:
        alpha = 2.0 * rank
    if alpha is None:
        reader.refuse(keys.alpha, "adapters have a scale", suggestions=(f"{keys.alpha}: 16",))
    else:
        reader.set_or_default(keys.alpha, "lora.alpha", float(alpha), "adapters are scaled by it")
    if keys.every and reader.flag(keys.every, setting="lora.targets"):
        reader.set(keys.every, "lora.targets", ALL_LINEAR, "layers with an adapter")
        reader.skip(keys.targets, f"{keys.every} says it")
    else:
        _read_targets(reader, keys.targets)
        if keys.every:
            reader.skip(keys.every, f"{keys.targets} says it")
    reader.only(keys.dropout, (0, 0.0), "adapters read without dropout", setting="lora.dropout")
    if reader.flag(keys.rslora, setting="lora.rslora"):
        reader.set(keys.rslora, "lora.rslora", True, "the scale is over the root of the width")
    else:
        reader.skip(keys.rslora, "the scale is over the width")
    if keys.folder and reader.has(keys.folder):
        _read_folder(reader, keys.folder)


def _read_folder(reader: KeyReader, key: str) -> None:
    folders = _names(reader.given[key])
    if len(folders) == 1:
        reader.set(key, "train.adapters", folders[0], "what adapters begin as")
    else:
        reader.refuse(key, "a run begins with one set of adapters", suggestions=folders[-1:])


def _names(given: object) -> list[str]:
    """Names in a list, or in a text that separates them by commas."""
    listed = cast("list[object]", given) if isinstance(given, list) else str(given).split(",")
    return [str(name).strip() for name in listed]


def _read_targets(reader: KeyReader, key: str) -> None:
    why = "layers with an adapter"
    if not reader.has(key):
        reader.set_or_default(key, "lora.targets", ALL_LINEAR, why)
        return
    found = _names(reader.given[key])
    if any(name in _EVERY for name in found):
        reader.set(key, "lora.targets", ALL_LINEAR, why)
        return
    wanted = {_LAYERS[name] for name in found if name in _LAYERS}
    if len(wanted) != len(found):
        known = list(_LAYERS)
        reader.refuse(
            key, "adapters stand beside linear layers of blocks", suggestions=(", ".join(known),)
        )
        return
    reader.set(key, "lora.targets", [name for name in LORA_LINEARS if name in wanted], why)


def model_of(name: str) -> Flavor | None:
    """Return the preset that has the sizes of a model, and its changes; None if unknown."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _TAIL.sub("", plain)) != plain:
        plain = shorter
    presets = {_letters(preset): preset for preset in preset_names("models")}
    for size in ("8B", "70B"):
        if _letters(plain) == f"llama3.1{size.lower()}":
            return FLAVORS["llama3", size]
    preset = presets.get(_letters(plain))
    return None if preset is None else Flavor(preset=preset)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


def read_model_name(reader: KeyReader, key: str, context: ImportContext) -> None:
    """Map the model that a trainer starts from: its sizes, and the weights that it has."""
    if not reader.has(key):
        return
    name = str(reader.given[key])
    named = {"model.preset", "model.hf_config", "model.layers"} & context.keys_named
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        reader.set(key, "model.hf_config", str(folder / "config.json"), "its sizes")
        reader.set(key, WEIGHTS, str(folder), "what the run starts from")
        return
    found = model_of(name)
    if named:
        reader.skip(key, f"{min(named)} of what the run builds on says its sizes")
    elif found is None:
        why = "its sizes are not known here: name its config.json, in a folder of yours"
        reader.refuse(key, why, suggestions=("--set model.hf_config=FOLDER/config.json",))
    else:
        reader.set(key, "model.preset", found.preset, f"the sizes of {name}")
        if found.name:
            reader.set(key, "model.name", found.name, "the preset with what it has otherwise")
        for setting, value in found.changes.items():
            reader.set(key, setting, value, f"of {name}")
    if WEIGHTS in context.keys_named:
        reader.skip(key, f"{WEIGHTS} says what the run starts from")
    else:
        reader.refuse(
            WEIGHTS,
            f"the run starts from the weights of {name}, which are fetched by nobody here",
            suggestions=(f"--set {WEIGHTS}=FOLDER",),
        )


KEY = "deepspeed"
_PRINT = "steps_per_print"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFile:
    """Read the file that `KEY` names: its stage first, and all else once data ranks are known."""

    reader: KeyReader
    inner: KeyReader
    stage: int

    @classmethod
    def of(cls, reader: KeyReader) -> DeepSpeedFile | None:
        """Return the file, None where there is none or it is not here."""
        inner = inner_reader(reader, KEY, "DeepSpeed")
        if inner is None:
            return None
        inner.sections(TABLES.sections)
        inner.skip(_PRINT, "what the Trainer logs is shown")
        inner.given = {key: value for key, value in inner.given.items() if key != _PRINT}
        return cls(reader=reader, inner=inner, stage=read_stage(inner))

    def read(self, keys: TrainerKeys, data: int, context: ImportContext) -> None:
        """Note what becomes of its keys, after those of the Trainer: they win."""
        inner = self.inner
        # What the Trainer's own keys came to, "auto" among them.
        theirs = self.reader.entries.get("precision.parameters")
        context = replace(context, parameters="fp32" if theirs is None else str(theirs.value))
        named = {k: one for k, one in self.reader.entries.items() if k.startswith("model.")}
        if named:
            # Sizes that follow from the model are those of the file's, not of a base.
            context = replace(context, model=import_context(named, None).model)
        self._match(self._of_trainer(keys, context))
        gradients = read_precision(inner, context, self._added_table(keys))
        read_engine(inner, self.stage, gradients, data, context)
        adopt(self.reader, KEY, inner)

    def _added_table(self, keys: TrainerKeys) -> str:
        """Return the table of the Trainer's half where the file has none: accelerate adds it.

        `set_mixed_precision` of utils/dataclasses.py, accelerate 1.
        """
        half = next((name for name, on in halves_on(self.reader).items() if on), "")
        old = half == "bf16" and self.inner.given.get("bfloat16.enabled") is True
        there = old or self.inner.keys_of(half)
        return "" if there or self.reader.given.get(keys.pure) else half

    def _of_trainer(self, keys: TrainerKeys, context: ImportContext) -> dict[str, _Theirs]:
        """Return what the Trainer compares: of keys of the file its own name and value."""
        given, half = self.reader.given, context.parameters
        micro_size = given.get(keys.micro, keys.default_micro)
        accumulation = given.get(keys.steps, 1)
        rate, betas = self._value("learning_rate"), [self._value(f"beta{n}") for n in (1, 2)]
        clip, rise = self._value("clip_norm"), self._value("warmup_steps")
        steps = self.reader.entries.get("train.steps")
        total, micro, accumulated = BATCH
        found = {
            micro: _Theirs(keys.micro, micro_size),
            accumulated: _Theirs(keys.steps, accumulation),
            "gradient_clipping": _Theirs("max_grad_norm", 0.0 if clip == "none" else clip),
            "optimizer.params.lr": _Theirs("learning_rate", rate),
            "optimizer.params.betas": _Theirs(
                "adam_beta1, adam_beta2", None if None in betas else betas
            ),
            "optimizer.params.eps": _Theirs("adam_epsilon", self._value("eps")),
            "optimizer.params.weight_decay": _Theirs("weight_decay", self._value("weight_decay")),
            "scheduler.params.warmup_max_lr": _Theirs("learning_rate", rate),
            "fp16.enabled": _Theirs("fp16", half == "fp16"),
            "bf16.enabled": _Theirs("bf16", half == "bf16"),
        }
        if context.ranks and isinstance(micro_size, int) and isinstance(accumulation, int):
            # All ranks, those that read the same samples too.
            what = f"ranks x {keys.micro} x {keys.steps}"
            found[total] = _Theirs(what, context.ranks * micro_size * accumulation)
        if steps is not None:
            found["scheduler.params.total_num_steps"] = _Theirs("number of steps", steps.value)
        if isinstance(rise, int):
            found["scheduler.params.warmup_num_steps"] = _Theirs("warm-up", max(1, rise))
        return found

    def _value(self, name: str) -> object:
        """Return a setting of the optimizer that the Trainer's keys came to."""
        entry = self.reader.entries.get(f"optimizer.{name}")
        return entry.value if entry else None

    def _match(self, theirs: Mapping[str, _Theirs]) -> None:
        """Refuse each key at which the Trainer stops; it is read on as if it were "auto"."""
        inner = self.inner
        other = {
            key: one
            for key, one in theirs.items()
            if one.value is not None
            and inner.has(key)
            and not inner.is_auto(key)
            and inner.given[key] != one.value
        }
        for key, one in other.items():
            why = f"the Trainer stops, as its {one.name} is {json_text(one.value)}"
            inner.refuse(key, why, suggestions=('"auto"', json_text(one.value)))
        inner.given = {**inner.given, **dict.fromkeys(other, AUTO)}
        for key in BATCH:
            if key not in other:
                name = (
                    theirs[key].name if key in theirs else "sizes, and as many ranks as there are,"
                )
                inner.skip(key, f"{name} of the Trainer")


def finish_trainer(
    reader: KeyReader,
    tables: ToolTables,
    keys: TrainerKeys,
    file: DeepSpeedFile | None,
    data: int,
    context: ImportContext,
) -> None:
    """Read the file that the trainer names, and what its tables say of the keys that are left."""
    if file is not None:
        file.read(keys, data, context)
    reader.finish(tables.keys, "method", "rest")


@dataclass(frozen=True, slots=True)
class _Theirs:
    """Hold what the Trainer calls a value of the file, and has for it; None where it says none."""

    name: str
    value: object
