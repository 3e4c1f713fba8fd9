"""Small training runs for tests: a text, a tiny model, what each rank is told, what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

import echelon as ec
from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.core.event import EventSink, NoEvents
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.training.checkpoint.index import read_index
from echelon.training.data.prepare import prepare
from echelon.training.loop import RankTask, TrainSummary
from echelon.training.observer import StepFacts

TINY = (
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "batch.sequence_length=16",
    "batch.global_sequences=4",
    "batch.microbatch_sequences=1",
    "optimizer.warmup_steps=2",
    "train.steps=8",
    'train.validate_every="never"',
    "checkpoint.every=2",
    'checkpoint.keep="all"',
)
FP64 = tuple(
    f"precision.{role}=fp64" for role in ("parameters", "gradients", "reduction", "master")
)

State = dict[str, torch.Tensor]
"""Whole tensors of a checkpoint, as "kind/name"."""


class Notes:
    """Write down every step of a rank in a file beside its run."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.sink: EventSink = NoEvents()
        self._file = (run_dir / f"notes-{rank}.txt").open("a", encoding="ascii")

    def used_bytes(self) -> int:
        return 0

    def stepped(self, facts: StepFacts) -> None:
        values = (facts.loss, facts.grad_norm, facts.loss_scale, float(facts.skipped))
        self._file.write(f"{facts.step} {' '.join(map(repr, values))}\n")

    def validated(self, step: int, loss: float) -> None:
        raise AssertionError("these runs are not validated")

    def saved(self, step: int, path: Path) -> None:
        pass

    def noted(self, step: int, text: str) -> None:
        pass

    def speaks(self, now: bool) -> None:
        pass

    def close(self) -> None:
        self._file.close()


def notes(_job: object, run_dir: Path, rank: int) -> Notes:
    """Build the observer of these runs."""
    return Notes(run_dir, rank)


class ValidatedNotes(Notes):
    """Let a run be validated; its summary says what came of it."""

    def validated(self, step: int, loss: float) -> None:
        pass


def validated_notes(_job: object, run_dir: Path, rank: int) -> Notes:
    """Build the observer of runs that are validated."""
    return ValidatedNotes(run_dir, rank)


def small_job(settings: Sequence[str]) -> Job:
    """Return the job of a tiny run; `settings` win over those of all tiny runs."""
    keys = {setting.split("=")[0] for setting in settings}
    return load_job("nano", [*(s for s in TINY if s.split("=")[0] not in keys), *settings])


def small_data(folder: Path) -> Path:
    """Prepare a few kilobytes of text."""
    words = [f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)]
    (folder / "words.txt").write_text("".join(words))
    prepare([str(folder / "words.txt")], folder / "data", tokenizer="bytes")
    return folder / "data"


def train(
    pool: RankPool,
    run_dir: Path,
    data: Path,
    settings: Sequence[str],
    resume: Path | None = None,
    observer: str = "notes",
) -> TrainSummary:
    """Train and return what rank 0 says; the ranks must say the same."""
    job = small_job(settings)
    run_dir.mkdir(parents=True, exist_ok=True)
    task = RankTask(
        job=job,
        run_dir=str(run_dir),
        data=str(data),
        observer=f"{__name__}:{observer}",
        resume=None if resume is None else str(resume),
    )
    mesh = job.plan.mesh
    labels = [mesh.label(rank) for rank in range(mesh.world_size)]
    results = pool.run(
        "echelon.training.loop:train_rank", to_json(task), mesh.world_size, labels=labels
    )
    assert all(result == results[0] for result in results)
    return results[0]


def read_steps(run_dir: Path, rank: int = 0) -> dict[int, tuple[float, ...]]:
    """Return step -> (loss, gradient norm, loss scale, skipped) as a rank noted them."""
    lines = (run_dir / f"notes-{rank}.txt").read_text().splitlines()
    rows = [[float(word) for word in line.split()] for line in lines]
    return {int(step): tuple(values) for step, *values in rows}


def checkpoint_of(run_dir: Path, step: int) -> Path:
    """Return where a run has the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def whole_state(path: Path) -> State:
    """Return every tensor of a checkpoint, put together from its pieces."""
    found: State = {}
    for kind, entries in read_index(path).tensors.items():
        for name, entry in entries.items():
            for piece in entry.pieces:
                with safe_open(path / piece.file, framework="pt") as file:
                    data = file.get_tensor(piece.key)
                whole = found.setdefault(
                    f"{kind}/{name}", torch.full(entry.shape, float("nan"), dtype=data.dtype)
                )
                place = zip(piece.offset, piece.shape, strict=True)
                whole[tuple(slice(start, start + size) for start, size in place)] = data
    return found


def trained_run(folder: Path, settings: Sequence[str] = ()) -> ec.TrainResult:
    """Train a tiny model of bytes on a few lines, and return its run."""
    words = folder / "words.txt"
    words.write_text("".join(f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)))
    places = [f'train.runs_dir="{folder}/runs"', f'data.source="{words}"']
    keys = {setting.split("=")[0] for setting in settings}
    tiny = [one for one in TINY if one.split("=")[0] not in keys]
    return ec.train("nano", settings=[*tiny, *places, "train.run_name=tiny", *settings])
