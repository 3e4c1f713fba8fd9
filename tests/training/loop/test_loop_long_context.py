"""Training over context ranks through the whole path: run file, data, loop, checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.training.data.prepare import prepare
from echelon.training.loop import RankTask
from tests.training.loop.test_loop import TINY, notes, read_steps

RUN = """\
extends = "nano"

[mesh]
cp = 1

[batch]
sequence_length = 512
global_sequences = 2
microbatch_sequences = 1

[optimizer]
warmup_steps = 2

[train]
steps = 6
validate_every = "never"
"""
"""The demo's model at four times its sequence length."""

FP64 = [f"precision.{name}=fp64" for name in ("parameters", "gradients", "reduction", "master")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare documents of very unequal lengths."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(300):
        text = "".join(f"{i} of {number}; " for i in range(number**2 % 29))
        (folder / f"{number:03}.txt").write_text(text or "no")
    prepare([str(folder)], folder / "data", tokenizer="bytes")
    return folder / "data"


def train(
    pool: RankPool, run_dir: Path, data: Path, file: str, sets: Sequence[str], resume: str = ""
) -> dict[int, tuple[float, float]]:
    """Train what a run file and settings say; return step -> (loss, gradient norm)."""
    job = load_job(file, list(sets))
    run_dir.mkdir(parents=True)
    task = RankTask(
        job=job,
        run_dir=str(run_dir),
        data=str(data),
        observer=f"{notes.__module__}:{notes.__name__}",
        resume=resume or None,
    )
    world = job.plan.mesh.world_size
    pool.run("echelon.training.loop:train_rank", to_json(task), world)
    every = [read_steps(run_dir, rank) for rank in range(world)]
    assert all(steps == every[0] for steps in every)
    return every[0]


@pytest.mark.slow
def test_one_changed_line_trains_a_four_times_longer_sequence_on_four_ranks(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    """In fp32, four ranks are as far from the float64 run as one rank is, times luck.

    The losses of a correct run differ from those of exact arithmetic by rounding, which grows with
    the steps; one rank's own distance measures that. A draw of the same size may be four times the
    largest of six, and a loss is rounded once more for each of four ranks
    (`proof/claims/tolerance.py`).
    """
    one, four = tmp_path / "one.toml", tmp_path / "four.toml"
    one.write_text(RUN)
    four.write_text(RUN.replace("cp = 1\n", "cp = 4\n"))
    differs = [a != b for a, b in zip(RUN.splitlines(), four.read_text().splitlines(), strict=True)]
    assert sum(differs) == 1
    exact = train(rank_pool, tmp_path / "exact", data, str(one), FP64)
    alone = train(rank_pool, tmp_path / "one", data, str(one), ())
    cut = train(rank_pool, tmp_path / "four", data, str(four), ())
    assert sorted(cut) == [1, 2, 3, 4, 5, 6]
    assert exact[6][0] < 0.9 * exact[1][0]
    for which in range(2):
        own = max(abs(alone[step][which] / exact[step][which] - 1) for step in exact)
        for step, values in exact.items():
            error = abs(cut[step][which] / values[which] - 1)
            assert error <= 4 * own + 4 * 2.0**-24, (step, which, error, own)


KINDS = {
    "ring": ("mesh.cp=2",),
    "striped, tp2 sp": (
        "mesh.cp=2",
        "mesh.tp=2",
        "mesh.sequence_parallel=true",
        "context.kind=striped",
    ),
    "gathered, pp2": ("mesh.cp=2", "mesh.pp=2", "context.kind=gathered"),
    "ulysses, zero 3": ("mesh.cp=2", "mesh.dp_shard=2", "zero.stage=3", "context.kind=ulysses"),
    "both": ("mesh.cp=4", "context.kind=ulysses-ring", "context.ulysses_degree=2"),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", KINDS)
def test_documents_of_real_data_are_cut_for_context_ranks(
    rank_pool: RankPool, tmp_path: Path, data: Path, name: str
) -> None:
    base = [*TINY, "batch.documents=separate", 'train.validate_every="never"']
    alone = train(rank_pool, tmp_path / "alone", data, "nano", base)
    joined = [one for one in base if one != "batch.documents=separate"]
    mixed = train(rank_pool, tmp_path / "mixed", data, "nano", joined)
    assert mixed != alone
    found = train(rank_pool, tmp_path / "cut", data, "nano", [*base, *KINDS[name]])
    for step, values in alone.items():
        assert found[step] == pytest.approx(values, rel=1e-10, abs=0)


@pytest.mark.slow
def test_a_run_goes_on_with_another_cut_of_its_sequences(
    rank_pool: RankPool, tmp_path: Path, data: Path
) -> None:
    base = [*TINY, 'train.validate_every="never"']
    whole = train(rank_pool, tmp_path / "whole", data, "nano", base)
    before = train(rank_pool, tmp_path / "ring", data, "nano", [*base, *KINDS["ring"]])
    middle = str(tmp_path / "ring" / "checkpoints" / "step-000003")
    layout = [*base, *KINDS["ulysses, zero 3"]]
    after = train(rank_pool, tmp_path / "ulysses", data, "nano", layout, resume=middle)
    assert sorted(after) == [4, 5, 6]
    for step, values in whole.items():
        assert before[step] == pytest.approx(values, rel=1e-10, abs=0)
        if step > 3:
            assert after[step] == pytest.approx(values, rel=1e-10, abs=0)
