"""The loop: what it says, where it stops, and that a resumed run is the unbroken one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import save_file

from echelon.config.load import load_job
from echelon.core.event import EventList
from echelon.core.parameters import parameters
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.models.counter_random import initial_values
from echelon.training.data.prepare import prepare
from echelon.training.loop import RankTask, TrainSummary
from echelon.training.observer import StepFacts
from tests.training import small_runs

TINY = (
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "batch.sequence_length=16",
    "batch.global_sequences=4",
    "batch.microbatch_sequences=1",
    "optimizer.warmup_steps=2",
    "precision.parameters=fp64",
    "precision.gradients=fp64",
    "precision.reduction=fp64",
    "precision.master=fp64",
    "train.steps=6",
    "checkpoint.every=3",
    'checkpoint.keep="all"',
)
VALIDATED = "train.validate_every=3"
LAYOUTS = {
    "dp2": ("mesh.dp_replicate=2",),
    "tp2 sp": ("mesh.tp=2", "mesh.sequence_parallel=true"),
    "pp2": ("mesh.pp=2",),
}
STRATEGIES = {
    **LAYOUTS,
    "zero 3": ("mesh.dp_shard=2", "zero.stage=3"),
    "ring": ("mesh.cp=2",),
}
"""What one script is run with: nothing else changes."""


class Notes(small_runs.Notes):
    """Write down all that a rank is told, and the phases of a step."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        super().__init__(run_dir, rank)
        self.sink = self._events = EventList()

    def stepped(self, facts: StepFacts) -> None:
        self._file.write(f"step {facts.step} {facts.loss!r} {facts.grad_norm!r}\n")

    def validated(self, step: int, loss: float) -> None:
        self._file.write(f"valid {step} {loss!r}\n")

    def saved(self, step: int, path: Path) -> None:
        self._file.write(f"saved {step} {path.name}\n")

    def close(self) -> None:
        kinds = [event.kind for event in self._events.events]
        if "update" in kinds:
            step = kinds[kinds.index("load") : kinds.index("update") + 1]
            self._file.write(f"phases {' '.join(dict.fromkeys(step))}\n")
        super().close()


def notes(_job: object, run_dir: Path, rank: int) -> Notes:
    """Build the observer of these tests."""
    return Notes(run_dir, rank)


def read_steps(run_dir: Path, rank: int = 0) -> dict[int, tuple[float, float]]:
    """Return step -> (loss, gradient norm) as a rank noted them."""
    lines = (run_dir / f"notes-{rank}.txt").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("step")]
    return {int(step): (float(loss), float(norm)) for _, step, loss, norm in words}


def train(
    pool: RankPool,
    run_dir: Path,
    data: Path,
    layout: Sequence[str],
    resume: Path | None = None,
    base: Sequence[str] = TINY,
) -> TrainSummary:
    """Train the tiny model and return what rank 0 says; the ranks must say the same."""
    validation = [] if any("validate_every" in one for one in layout) else [VALIDATED]
    job = load_job("nano", [*base, *validation, *layout])
    run_dir.mkdir(parents=True, exist_ok=True)
    task = RankTask(
        job=job,
        run_dir=str(run_dir),
        data=str(data),
        observer=f"{__name__}:notes",
        resume=None if resume is None else str(resume),
    )
    world = job.plan.mesh.world_size
    results = pool.run("echelon.training.loop:train_rank", to_json(task), world)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a few kilobytes of text."""
    folder = tmp_path_factory.mktemp("text")
    words = [f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)]
    (folder / "words.txt").write_text("".join(words))
    prepare([str(folder / "words.txt")], folder / "data", tokenizer="bytes")
    return folder / "data"


Trained = Callable[[tuple[str, ...]], tuple[Path, TrainSummary]]


@pytest.fixture(scope="module")
def trained(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory, data: Path) -> Trained:
    """Return a function that trains under a layout once, and gives the run and its summary."""

    @cache
    def once(layout: tuple[str, ...]) -> tuple[Path, TrainSummary]:
        folder = tmp_path_factory.mktemp("run")
        return folder, train(rank_pool, folder, data, layout)

    return once


@pytest.mark.system("S54")
@pytest.mark.quick("dp2", "zero 3")
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layout_takes_the_same_steps(trained: Trained, name: str) -> None:
    folder, alone = trained(())
    expected = read_steps(folder)
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert alone.steps == 6
    assert not alone.stopped
    folder, _ = trained(STRATEGIES[name])
    for rank in range(2):
        found = read_steps(folder, rank)
        for step, values in expected.items():
            assert found[step] == pytest.approx(values, rel=1e-10, abs=0)


def test_events_name_the_phases_of_a_step(trained: Trained) -> None:
    folder, _ = trained(LAYOUTS["dp2"])
    for rank in range(2):
        *_, last = (folder / f"notes-{rank}.txt").read_text().splitlines()
        assert last == "phases load all_gather F BW all_reduce update"


@pytest.mark.system("S52")
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(
    rank_pool: RankPool, trained: Trained, tmp_path: Path, data: Path
) -> None:
    layout = LAYOUTS["tp2 sp"]
    folder, whole = trained(layout)
    middle = folder / "checkpoints" / "step-000003"
    resumed = train(rank_pool, tmp_path / "again", data, layout, resume=middle)
    unbroken = read_steps(folder)
    assert read_steps(tmp_path / "again") == {step: unbroken[step] for step in (4, 5, 6)}
    assert resumed.last_validation == whole.last_validation


def test_a_run_goes_on_under_another_layout(
    rank_pool: RankPool, trained: Trained, tmp_path: Path, data: Path
) -> None:
    folder, _ = trained(LAYOUTS["tp2 sp"])
    middle = folder / "checkpoints" / "step-000003"
    train(rank_pool, tmp_path / "pp", data, LAYOUTS["pp2"], resume=middle)
    before, after = read_steps(folder), read_steps(tmp_path / "pp")
    for step in (4, 5, 6):
        assert after[step] == pytest.approx(before[step], rel=1e-10, abs=0)


def test_a_nan_stops_all_ranks_at_one_step_and_is_located(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    layout = (*LAYOUTS["pp2"], "optimizer.learning_rate=1e200", "optimizer.weight_decay=0")
    with pytest.raises(RankFailure) as failure:
        train(rank_pool, tmp_path / "nan", data, layout)
    error = failure.value.error
    assert error is not None
    assert error.rules == ("loss-not-finite",)
    message = error.problems[0].message
    assert "first seen on rank " in message
    steps = [sorted(read_steps(tmp_path / "nan", rank)) for rank in range(2)]
    assert steps[0] == steps[1]
    assert f"step {len(steps[0]) + 1}:" in message


def test_all_of_the_data_may_be_trained_on(rank_pool: RankPool, tmp_path: Path, data: Path) -> None:
    nothing_held_out = ('train.validate_every="never"', "data.validation_fraction=0")
    summary = train(rank_pool, tmp_path / "all", data, nothing_held_out)
    assert summary.steps == 6
    assert summary.first_validation is None


def test_other_data_is_not_resumed(rank_pool: RankPool, trained: Trained, tmp_path: Path) -> None:
    folder, _ = trained(())
    (tmp_path / "other.txt").write_text("nothing like it\n" * 300)
    prepare([str(tmp_path / "other.txt")], tmp_path / "other", tokenizer="bytes")
    middle = folder / "checkpoints" / "step-000003"
    with pytest.raises(RankFailure) as failure:
        train(rank_pool, tmp_path / "second", tmp_path / "other", (), resume=middle)
    assert failure.value.error is not None
    assert failure.value.error.rules == ("resume-same-data",)


ZERO3 = ("mesh.dp_shard=2", "zero.stage=3")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", [(), ZERO3, LAYOUTS["pp2"]], ids=["alone", "stage 3", "pp2"])
def test_a_run_that_starts_from_a_file_is_the_one_whose_weights_the_file_holds(
    rank_pool: RankPool, trained: Trained, tmp_path: Path, data: Path, layout: tuple[str, ...]
) -> None:
    other = load_job("nano", [*TINY, "train.seed=7"]).plan
    whole = {spec.name: initial_values(other.model, spec, 7) for spec in parameters(other.model)}
    save_file(whole, tmp_path / "weights.safetensors")
    train(rank_pool, tmp_path / "seed", data, ("train.seed=7",))
    start = f"train.weights={tmp_path / 'weights.safetensors'}"
    train(rank_pool, tmp_path / "file", data, ("train.seed=7", start, *layout))
    expected, found = read_steps(tmp_path / "seed"), read_steps(tmp_path / "file")
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-10, abs=0)
    train(rank_pool, tmp_path / "again", data, (start, *layout))
    folder, _ = trained(layout)
    again, without = read_steps(tmp_path / "again"), read_steps(folder)
    assert again[1] != without[1]


def test_masters_start_from_the_file_unrounded(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    base = [one for one in TINY if not one.startswith("precision.")]
    mixed = ["precision.parameters=bf16", "precision.gradients=bf16"]
    other = load_job("nano", [*TINY, "train.seed=7"]).plan
    whole = {spec.name: initial_values(other.model, spec, 7) for spec in parameters(other.model)}
    save_file(whole, tmp_path / "weights.safetensors")
    start = f"train.weights={tmp_path / 'weights.safetensors'}"
    steps = []
    for name, more in (("seed", ()), ("file", (start,))):
        setting = ("train.seed=7", *ZERO3, *mixed, *more)
        train(rank_pool, tmp_path / name, data, setting, base=base)
        steps.append(read_steps(tmp_path / name))
    assert steps[0] == steps[1]
