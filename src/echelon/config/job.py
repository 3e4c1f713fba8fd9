# SPDX-License-Identifier: Apache-2.0
"""The Job: a Plan, and the settings of a run that are no part of it.

A Job is resolved and legal, crosses processes as JSON, and keeps for every setting where its value
came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from echelon.config.presets import read_extendable
from echelon.core.choices.trackers import TRACKERS
from echelon.core.plan import Plan
from echelon.core.serialize import content_hash, from_json, to_json
from echelon.core.settings.configured import Configured
from echelon.core.settings.list_types import NO_MIXTURE, ChoiceList, MixtureList, MixturePart
from echelon.core.settings.value_types import (
    BYTES,
    EVERY,
    FRACTION,
    SECONDS,
    SECONDS_OR_ZERO,
    Integer,
    Text,
)

Never = Literal["never"]
EpochEnd = Literal["continue", "pad"]
TrainOn = Literal["all", "answers"]
"""What fills the last batch of an epoch: samples of the next epoch, or some of its own again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Say what the model reads.

    `source` is "stdlib" (the standard library's own source) or an absolute path, `tokenizer` is
    "bytes", "bpe-N" (byte-pair encoding of N ids, trained on the source) or an absolute path.
    `validation_fraction` of the tokens is held out. The last batch of an epoch that lacks samples
    takes the first of the next epoch, or of its own again (`epoch_end`). A `mixture` takes the
    place of `source`. `train_on` says whether all tokens count in the loss, or those of answers.
    """

    source: Annotated[
        str, Configured("stdlib, text, prepared data, or a URL; training needs it named", path=True)
    ] = "stdlib"
    tokenizer: Annotated[str, Configured("bytes, bpe-N, or a tokenizer.json", path=True)] = "bytes"
    validation_fraction: Annotated[float, Configured("of the tokens, held out", FRACTION)] = 0.01
    epoch_end: Annotated[
        EpochEnd,
        Configured(
            "a last batch that lacks samples goes on with the next epoch, "
            "or repeats some of its own"
        ),
    ] = "continue"
    mixture: Annotated[
        tuple[MixturePart, ...],
        Configured(
            "sources with weights, which may change at a step; in the place of data.source",
            MixtureList(),
            default=NO_MIXTURE,
            after="source",
        ),
    ] = ()
    train_on: Annotated[
        TrainOn, Configured("which tokens count in the loss: all, or those of the answers of chats")
    ] = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Say how long a run is and where it writes: `runs_dir`/`run_name`."""

    steps: Annotated[int, Configured("optimizer steps", default=1000)]
    run_name: Annotated[
        str,
        Configured(
            "folder of the run; auto: the name of the run file or preset",
            Text(
                pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*", means="letters, digits, dots, dashes and _"
            ),
            default="auto",
        ),
    ]
    runs_dir: Annotated[str, Configured("where run folders are made")] = "runs"
    weights: Annotated[
        str, Configured("safetensors file or folder to start from", path=True, after="steps")
    ] = "none"
    """"none" (first weights come from the seed) or an absolute path."""
    weights_optimizer: Annotated[
        bool,
        Configured(
            "go on from the optimizer state and the step of train.weights, a trainer's checkpoint",
            after="weights",
        ),
    ] = False
    adapters: Annotated[
        str,
        Configured("folder of PEFT's adapters to start from", path=True, after="weights_optimizer"),
    ] = "none"
    """"none" (adapters begin as the seed says) or the absolute path of a folder of PEFT."""
    validate_every: Annotated[
        int | Never, Configured("steps between validations; and at the end", EVERY)
    ] = "never"
    validation_batches: Annotated[int, Configured("global batches per validation")] = 8
    step_timeout_s: Annotated[float, Configured("a longer step ends the run", SECONDS)] = 600.0
    desync_after_s: Annotated[
        float,
        Configured(
            "seconds of waiting after which the calls of ranks are compared; 0: never",
            SECONDS_OR_ZERO,
        ),
    ] = 10.0

    def validates_after(self, num_steps: int) -> bool:
        """Return whether to validate when `num_steps` steps are done."""
        if self.validate_every == "never":
            return False
        return num_steps % self.validate_every == 0 or num_steps == self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Say after how many steps a checkpoint is written, and how many of the newest are kept."""

    every: Annotated[int | Never, Configured("steps between checkpoints", EVERY)] = "never"
    keep: Annotated[
        int | Literal["all"], Configured("newest checkpoints that stay", Integer(words=("all",)))
    ] = 2

    def saves_after(self, num_steps: int) -> bool:
        """Return whether to write a checkpoint when `num_steps` steps are done."""
        return self.every != "never" and num_steps % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveSettings:
    """Step lines, events and trackers of a run.

    `trackers` mirror metrics.jsonl under `tracker_project`; once the run has ended they have
    `tracker_drain_s` seconds for what is left.
    """

    log_every: Annotated[
        int,
        Configured(
            "steps between step lines; auto: 200 lines a run at most",
            Integer(words=("auto",)),
            default="auto",
        ),
    ] = 1
    events: Annotated[bool, Configured("whether ranks write what they sent and ran")] = True
    events_budget_bytes: Annotated[
        int, Configured("of the events of all ranks; a longer run keeps every k-th step", BYTES)
    ] = 50_000_000
    trackers: Annotated[
        tuple[str, ...],
        Configured(
            "tools that mirror metrics.jsonl, in processes of their own",
            ChoiceList(options=tuple(TRACKERS), words=("none",)),
            default="none",
        ),
    ] = ()
    tracker_project: Annotated[str, Configured("project or experiment of these tools")] = "echelon"
    tracker_drain_s: Annotated[
        float, Configured("seconds that they have after the run for what is left", SECONDS)
    ] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSetting:
    """Name a setting, its value as it stands in a TOML file, and where the value came from."""

    key: str
    value: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Hold one run: what is computed and how it is split (the plan), and everything around it."""

    plan: Plan
    data: DataSettings
    train: TrainSettings
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)
    sources: tuple[ResolvedSetting, ...] = ()

    def source_of(self, key: str) -> str:
        """Return where the value of a setting came from; "" where that is not known."""
        return next((setting.source for setting in self.sources if setting.key == key), "")

    def content_hash(self) -> str:
        """Return 16 hex digits of everything but `sources`: what ranks must agree on."""
        return content_hash({**to_json(self), "sources": []})

    def for_ranks(self) -> dict[str, Any]:
        """Return the job as JSON values, to be handed to other processes."""
        return to_json(self)

    def to_json(self) -> str:
        """Return the job as readable JSON."""
        return json.dumps(to_json(self), indent=2) + "\n"

    @classmethod
    def from_ranks(cls, data: Any) -> Job:
        """Return the job that `for_ranks` gave; ValueError where it is not one."""
        return from_json(cls, data, where="job")

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `to_json` wrote; ValueError where it is not one."""
        return cls.from_ranks(json.loads(text))


SEQUENCES_KEY, LENGTH_KEY = "batch.global_sequences", "batch.sequence_length"
DTYPE_KEY = "precision.parameters"
_PRESET = "preset "
_DERIVED = "derived: "


def assumed_of_job(job: Job) -> tuple[str, ...]:
    """Assumptions about the batch and the dtypes of a run, as sentences."""
    sources = {row.key: row.source for row in job.sources}
    dtypes = sources[DTYPE_KEY]
    derived = (dtypes.removeprefix(_DERIVED),) if dtypes.startswith(_DERIVED) else ()
    return (*assumed_batch(sources), *derived)


def assumed_batch(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield the parts of the batch that come from a preset of a model, by sources of settings."""
    presets = {
        key: source
        for key in (SEQUENCES_KEY, LENGTH_KEY)
        if _is_model_preset(source := sources.get(key, ""))
    }
    words = {SEQUENCES_KEY: "the global batch", LENGTH_KEY: "the sequence length"}
    if len(presets) == len(words):
        yield f"the batch (of {presets[LENGTH_KEY]})"
        return
    for key, source in presets.items():
        yield f"{words[key]} (of {source})"


def _is_model_preset(source: str) -> bool:
    """True if the source is a preset of a model, which nobody tuned for a run."""
    if not source.startswith(_PRESET):
        return False
    preset = read_extendable(source.removeprefix(_PRESET))
    return preset is not None and preset.kind == "models"
