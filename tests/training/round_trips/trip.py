"""One round trip: a model of transformers is trained here at a split layout, leaves, and goes on.

    transformers, random -> save_pretrained -> a run from `train.weights`, 3 steps, split
    -> `echelon export weights --to hf` -> from_pretrained

Asked of each: logits before and after are those of transformers (fp32, 1e-5 of the largest); the
losses of the split steps, and every tensor after them, are those of transformers trained on the
same batches; the folder read back has the bits of the checkpoint; and from the folder on a run,
split otherwise, and transformers have the same losses.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from echelon.api.run_setup import prepare_run
from echelon.cli.main import main as echelon
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.config.rules.finders import require_trainable
from echelon.core.errors import EchelonError
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters, router_biases
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Decoder
from echelon.training.checkpoint.folder import find_checkpoint
from echelon.training.checkpoint.index import PARAMETERS
from echelon.training.data.batches import BatchLayout, training_batch
from echelon.training.data.mixed_dataset import open_data
from echelon.training.steps.expert_balance import ROUTER_BIAS
from tests.training.round_trips.draws import Settings
from tests.training.round_trips.layouts import LENGTH, Updates, draw_layout
from tests.training.round_trips.theirs import (
    Batch,
    Tensors,
    make_model,
    read_model,
    their_logits,
    train_theirs,
)
from tests.training.small_runs import read_steps, whole_state
from tests.training.weights.test_export import back

STEPS = 3
LOGITS = 1e-5
"""Of the largest logit: both sum numbers of that size in fp32, in another order."""
LOSSES = 1e-5
"""Of a loss, the mean of as many logarithms."""
GRADIENTS = 2e-6
"""How far an element of a gradient may be off by rounding, of the largest of all gradients: some
ten times the rounding of one sum in fp32."""
DRAWS = 60
"""Layouts that are drawn for one model at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Hold what is told of one trip."""

    kind: str
    """The model_type."""
    settings: Settings
    """The settings of its configuration."""
    updates: Updates
    """The optimizer of both sides."""
    layout: tuple[str, ...]
    """How the run is split."""
    onwards: tuple[str, ...]
    """How the run that goes on from the folder is split."""
    model_type: str | None
    """What the folder is said to be; None: what is found first."""
    file_bytes: int | None = None
    """Of a file of the folder, at most."""


@dataclass(slots=True)
class Findings:
    """Hold what is wrong with a trip, and how near to wrong the rest is."""

    problems: list[str] = field(default_factory=list[str])
    worst: dict[str, float] = field(default_factory=dict[str, float])
    """The largest error of each kind, as a part of what is allowed."""

    def compare(self, name: str, what: str, ours: Any, theirs: Any, allowed: float) -> None:
        """Note by how much two tensors, or two lists of numbers, differ at most."""
        a, b = (torch.as_tensor(one, dtype=torch.float64) for one in (ours, theirs))
        if a.shape != b.shape:
            self.problems.append(f"{what}: {tuple(a.shape)} here, {tuple(b.shape)} there")
            return
        error = float((a - b).abs().max()) if a.numel() else 0.0
        share = error / allowed if allowed else 0.0 if error == 0.0 else inf
        self.worst[name] = max(self.worst.get(name, 0.0), share)
        if not share <= 1.0:
            self.problems.append(f"{what}: off by {error:.3g}, where {allowed:.3g} is allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Hold where runs are made, of which text, and the ranks that they are run on."""

    folder: Path
    text: Path
    pool: RankPool


def small_text(folder: Path) -> Path:
    """Write some lines, and return the file."""
    path = folder / "words.txt"
    path.write_text("".join(f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)))
    return path


def job_of(
    place: Place,
    hub: Path,
    settings: Sequence[str],
    updates: Updates,
    *,
    name: str = "there",
    weights: Path | None = None,
) -> Job:
    """Return the job of a run that starts from a folder of transformers; it may be refused."""
    job = load_job(
        "nano",
        [
            f"model.hf_config={hub}",
            f"train.weights={weights or hub}",
            f'train.runs_dir="{place.folder}/runs"',
            f'data.source="{place.text}"',
            f"train.run_name={name}",
            f"train.steps={STEPS}",
            'train.validate_every="never"',
            f"checkpoint.every={STEPS}",
            "observe.log_every=1",
            f"batch.sequence_length={LENGTH}",
            *updates.settings,
            *settings,
        ],
    )
    try:
        require_trainable(job.plan, job.sources)
    except EchelonError as error:
        # What loads is a plan: to refuse it later is a fault, and no refusal of a draw.
        raise AssertionError(f"a plan that loads is refused: {error}") from error
    return job


def layout_for(
    random: Random, refused: Counter[str], *, experts: bool, job: Callable[[list[str]], Job]
) -> list[str]:
    """Return the first layout that rules let pass; `refused` counts those that did not."""
    for _ in range(DRAWS):
        layout = draw_layout(random, experts=experts)
        try:
            job(layout)
        except EchelonError as error:
            refused.update(set(error.rules))
        else:
            return layout
    raise AssertionError(f"no layout of {DRAWS} is one: {refused}")


def run_here(place: Place, job: Job) -> tuple[Path, list[float], list[Batch]]:
    """Train on ranks as `echelon train` does; return the run, its losses and its global batches."""
    run, task = prepare_run(job, None, lambda _: None)
    mesh = job.plan.mesh
    labels = [mesh.label(rank) for rank in range(mesh.world_size)]
    told = to_json(replace(task, observer="tests.training.small_runs:notes"))
    place.pool.run("echelon.training.loop:train_rank", told, mesh.world_size, labels=labels)
    losses = [row[0] for _, row in sorted(read_steps(run.path).items())]
    return run.path, losses, batches_of(job, Path(task.data))


def batches_of(job: Job, data: Path) -> list[Batch]:
    """Return the global batch of each step."""
    dataset = open_data(data, train_on=job.data.train_on)
    training, _ = dataset.split(job.data.validation_fraction)
    layout, seed = BatchLayout.from_plan(job.plan), job.plan.mathematics.seed
    found: list[Batch] = []
    for step in range(job.train.steps):
        batch = training_batch(training, layout, seed=seed, step=step)
        parts = [
            batch.microbatch(dp_rank=rank, microbatch=index)
            for rank in range(layout.dp)
            for index in range(layout.num_microbatches)
        ]
        inputs = torch.cat([torch.from_numpy(one.inputs_BT) for one in parts])
        labels = torch.cat([torch.from_numpy(one.labels_BT) for one in parts])
        found.append((inputs.long(), labels.long()))
    return found


def our_logits(shape: ModelShape, tensors: Tensors, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, V] of our decoder with these weights and biases of routers."""
    decoder = Decoder(shape)
    decoder.load_state_dict({spec.name: tensors[spec.name] for spec in parameters(shape)})
    decoder.operations.routing.biases = {
        spec.layer: tensors[spec.name] for spec in router_biases(shape) if spec.layer is not None
    }
    sequences, length = tokens_BT.shape
    batch = TokenBatch.from_rows(tokens_BT, tokens_BT, torch.arange(sequences))
    with torch.no_grad():
        logits_NV = decoder.logits(decoder.norm(decoder.hidden(None, batch)))
    return logits_NV.view(length, sequences, -1).transpose(0, 1)


def checkpoint_tensors(run: Path) -> Tensors:
    """Return the parameters, and biases of routers, that a run ended with."""
    state = whole_state(find_checkpoint(run).path)
    return {
        name.partition("/")[2]: tensor
        for name, tensor in state.items()
        if name.partition("/")[0] in (PARAMETERS, ROUTER_BIAS)
    }


def export(run: Path, out: Path, trip: Trip) -> None:
    """Write the folder of a run by the command."""
    flags = ["--out", str(out), "--dtype", "fp32"]
    if trip.model_type is not None:
        flags += ["--model-type", trip.model_type]
    if trip.file_bytes is not None:
        flags += ["--file-bytes", str(trip.file_bytes)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = echelon(["export", "weights", str(run), "--to", "hf", *flags])
    assert code == 0, said.getvalue()


def folder_tensors(folder: Path) -> Tensors:
    """Return the tensors of all files of a folder."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    return found


def take(trip: Trip, place: Place) -> Findings:
    """Take one trip, and return what is wrong."""
    found = Findings()
    before, out = place.folder / "before", place.folder / "out"
    model = make_model(trip.kind, trip.settings, before)
    job = job_of(place, before, trip.layout, trip.updates)
    shape = job.plan.model
    run, losses, batches = run_here(place, job)
    tokens_BT = batches[0][0][:2]
    theirs = their_logits(model, tokens_BT)
    first = our_logits(shape, back(before, shape), tokens_BT)
    found.compare(
        "logits before", "logits before", first, theirs, LOGITS * float(theirs.abs().max())
    )
    trained = train_theirs(model, batches, trip.updates)
    for step, (ours, right) in enumerate(zip(losses, trained.losses, strict=True), start=1):
        found.compare("losses", f"loss of step {step}", ours, right, LOSSES * right)

    export(run, out, trip)
    held = checkpoint_tensors(run)
    for name, tensor in back(out, shape).items():
        found.compare("bits", f"{name}, read back", tensor, held[name], 0.0)
    after = read_model(out)
    theirs = their_logits(after, tokens_BT)
    ours = our_logits(shape, held, tokens_BT)
    found.compare("logits after", "logits after", ours, theirs, LOGITS * float(theirs.abs().max()))
    there = place.folder / "trained"
    model.save_pretrained(there)
    error = GRADIENTS * trained.largest_gradient * STEPS * trip.updates.gain
    if trip.model_type is not None:
        _compare_tensors(found, folder_tensors(out), folder_tensors(there), error)
    _compare_tensors(found, held, back(there, shape), error)
    _go_on(found, trip, place, after, held)
    return found


def _compare_tensors(found: Findings, ours: Tensors, theirs: Tensors, error: float) -> None:
    """Compare what was trained here with what was trained there, key by key."""
    if ours.keys() != theirs.keys():
        found.problems.append(f"keys on one side only: {sorted(ours.keys() ^ theirs.keys())}")
    for key in ours.keys() & theirs.keys():
        # Both sides round: transformers alone is off by 0.65 of one share from itself in float64.
        allowed = 2 * (error + 1e-6 * float(theirs[key].abs().max()))
        found.compare("tensors", key, ours[key], theirs[key], allowed)


def _go_on(found: Findings, trip: Trip, place: Place, model: Any, held: Tensors) -> None:
    """Train from the folder in both: fresh optimizers, other batches, another layout.

    A run that starts from the tensors of the checkpoint, by their names here, has the same bits.
    """
    settings = [*trip.onwards, "train.seed=7"]
    out = place.folder / "out"
    job = job_of(place, out, settings, trip.updates, name="on")
    run, losses, batches = run_here(place, job)
    trained = train_theirs(model, batches, trip.updates)
    for step, (ours, right) in enumerate(zip(losses, trained.losses, strict=True), start=1):
        found.compare("losses on", f"loss of step {step} onwards", ours, right, LOSSES * right)
    by_our_names = place.folder / "held.safetensors"
    save_file(held, by_our_names)
    job = job_of(place, out, settings, trip.updates, name="without", weights=by_our_names)
    other, again, _ = run_here(place, job)
    found.compare("bits on", "losses without the folder", losses, again, 0.0)
    last = checkpoint_tensors(other)
    for name, tensor in checkpoint_tensors(run).items():
        found.compare("bits on", f"{name} without the folder", tensor, last[name], 0.0)
