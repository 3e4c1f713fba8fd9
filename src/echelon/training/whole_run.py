# SPDX-License-Identifier: Apache-2.0
"""A whole run of the trainer for the prover, which imports no trainer and names these functions.

`write_data` prepares documents as a user's data are (on one rank); `train` runs the real loop on
every rank: the first plan to its end, validating and saving on the way, then the second plan, which
resumes where the first one stood in the middle; `read_back` (on one rank) reads the last
checkpoint, and writes on from prompts: over a cache, as `echelon generate` does, and without one.

What is observed goes into files of the folder that the prover owns: `run-N-rank-RRRR.json` of each
run, `read-back.safetensors` and `written.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from echelon.config.generation import Request, Sampling, generation_plan
from echelon.config.job import CheckpointSettings, DataSettings, Job, TrainSettings
from echelon.core.event import EventList, EventSink
from echelon.core.plan import Plan
from echelon.core.serialize import to_json
from echelon.launch.context import RankContext
from echelon.training.checkpoint.folder import checkpoint_path
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter
from echelon.training.generate import continue_tokens, load_decoder
from echelon.training.inference import GenerateTask, generate_rank
from echelon.training.loop import RankTask, TrainLoop
from echelon.training.observer import StepFacts

_SHARD_TOKENS = 100
"""Tokens of a file of data: so few that a step reads from several."""
_GREEDY = 1e-6
"""A temperature at which the likeliest token is drawn."""
_TOLD = ("loss", "tokens", "grad_norm", "learning_rate", "loss_scale", "skipped")


class WholeRunObserver:
    """Keep what the loop says of its steps, validations and checkpoints."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.events = EventList()
        self.told: list[dict[str, Any]] = []

    @property
    def sink(self) -> EventSink:
        """Where the events of this rank go."""
        return self.events

    def used_bytes(self) -> int:
        """Return no memory: nobody asks here."""
        return 0

    def stepped(self, facts: StepFacts) -> None:
        """Keep what a step says."""
        values = {name: getattr(facts, name) for name in _TOLD}
        self.told.append({"kind": "step", "step": facts.step, **values})

    def validated(self, step: int, loss: float) -> None:
        """Keep a validation loss."""
        self.told.append({"kind": "validation", "step": step, "loss": loss})

    def saved(self, step: int, path: Path) -> None:
        """Keep where a checkpoint lies."""
        self.told.append({"kind": "saved", "step": step, "path": str(path)})

    def noted(self, step: int, text: str) -> None:
        """Keep what else happened."""
        self.told.append({"kind": "note", "step": step, "text": text})

    def speaks(self, now: bool) -> None:
        """Learn who tells of the run: every rank keeps what it says."""

    def close(self) -> None:
        """Leave what was kept: whoever made this writes it."""


def write_data(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Write the documents of `argument` (`texts`) to `folder`/data, one after the other."""
    encoder = ByteTokenizer()
    target = Path(argument["folder"]) / "data"
    with DatasetWriter(target, encoder, shard_tokens=_SHARD_TOKENS) as writer:
        for text in argument["texts"]:
            (tokens,) = encoder.encode_chunks([text.encode()])
            writer.add(tokens, ends_document=True)
        writer.commit()


def train(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Train `plans[0]`, then go on with `plans[1]` from the checkpoint after `saved_after` steps.

    `argument` also holds `folder`, `num_steps`, `validation_fraction` and `validation_batches`.
    """
    first, second = (_job(Plan.from_json(text), argument) for text in argument["plans"])
    folder = Path(argument["folder"])
    _run(context, folder, 0, first, resume=None)
    middle = checkpoint_path(folder / "run-0" / "checkpoints", argument["saved_after"])
    _run(context, folder, 1, second, resume=str(middle))


def read_back(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Read the last checkpoint on one device, and write `count` tokens after each of `prompts`.

    Over a cache a text ends where a document does. A model that looks ahead has no cache, and no
    text is longer than the positions of the model there.
    """
    folder, plan = Path(argument["folder"]), Plan.from_json(argument["plans"][1])
    index = TokenDataset.open(folder / "data").index
    last = checkpoint_path(folder / "run-1" / "checkpoints", argument["num_steps"])
    decoder = load_decoder(plan, last, index.tokenizer.hash)
    weights = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    save_file(weights, folder / "read-back.safetensors")
    end, prompts, count = index.tokenizer.end_of_document, argument["prompts"], argument["count"]
    separator = end if plan.mathematics.documents == "separate" else None
    said = {
        "without a cache": [
            continue_tokens(decoder, prompt, count, temperature=_GREEDY, separator=separator)
            for prompt in prompts
        ]
    }
    if plan.model.causal and max(map(len, prompts)) + count <= plan.model.max_positions:
        task = GenerateTask(
            plan=generation_plan(plan, ()),
            trained=plan,
            checkpoint=str(last),
            tokenizer_hash=index.tokenizer.hash,
            prompts=tuple(map(tuple, prompts)),
            request=Request(max_tokens=count, sampling=Sampling(temperature=0.0)),
            end=end,
            separator=separator,
        )
        said["over a cache"] = list(map(list, generate_rank(context, to_json(task)).written))
    (folder / "written.json").write_text(json.dumps(said), encoding="utf-8")


def _job(plan: Plan, argument: Mapping[str, Any]) -> Job:
    return Job(
        plan=plan,
        data=DataSettings(validation_fraction=argument["validation_fraction"]),
        train=TrainSettings(
            steps=argument["num_steps"],
            run_name="whole",
            validate_every=argument["num_steps"],
            validation_batches=argument["validation_batches"],
        ),
        checkpoint=CheckpointSettings(every=argument["saved_after"], keep="all"),
    )


def _run(context: RankContext, folder: Path, number: int, job: Job, *, resume: str | None) -> None:
    observer = WholeRunObserver()
    task = RankTask(
        job=job,
        run_dir=str(folder / f"run-{number}"),
        data=str(folder / "data"),
        observer=f"{__name__}:{WholeRunObserver.__name__}",
        resume=resume,
    )
    loop = TrainLoop(context, task, observer)
    try:
        loop.run()
        loop.engine.model.gathering.settle()
    finally:
        loop.engine.close()
    path = folder / f"run-{number}-rank-{context.rank:04d}.json"
    path.write_text(json.dumps(observer.told), encoding="utf-8")
