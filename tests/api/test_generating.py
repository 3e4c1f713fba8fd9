"""`ec.generate`: what a run writes, under which layout ever, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import echelon as ec
from echelon.core.errors import CheckpointError, ConfigError, InfeasiblePlan
from tests.training.small_runs import trained_run

PROMPTS = ["line 7 of ", "more"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ec.TrainResult:
    return trained_run(tmp_path_factory.mktemp("trained"), ["mesh.pp=2"])


def test_a_folder_that_is_no_run_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ec.generate(tmp_path, "def ")
    assert caught.value.rules == ("run-exists",)


def test_a_run_without_a_checkpoint_writes_nothing(run: ec.TrainResult, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.run, copy, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(CheckpointError) as caught:
        ec.generate(copy, "line ")
    assert caught.value.rules == ("checkpoint-exists",)


def test_every_layout_writes_the_same(run: ec.TrainResult) -> None:
    alone = ec.generate(run, PROMPTS, max_tokens=12, temperature=0)
    assert alone.texts == tuple(p + w for p, w in zip(PROMPTS, alone.written, strict=True))
    assert alone.checkpoint.name == "step-000008"
    split = ec.generate(
        run.run, PROMPTS, max_tokens=12, temperature=0, settings=["mesh.tp=2", "mesh.pp=2"]
    )
    assert split.tokens == alone.tokens
    assert set(split.cache_bytes) == {alone.cache_bytes[0] // 4}
    shared = ec.generate(
        run.run, PROMPTS, max_tokens=12, temperature=0, settings=["mesh.dp_replicate=2"]
    )
    assert shared.tokens == alone.tokens
    assert sum(shared.cache_bytes) == alone.cache_bytes[0]


def test_a_draw_hangs_on_its_seed(run: ec.TrainResult) -> None:
    first, again, other = (
        ec.generate(run, "line", max_tokens=20, temperature=1.5, seed=seed) for seed in (1, 1, 2)
    )
    assert first.text == again.text != other.text


def test_a_checkpoint_may_be_named(run: ec.TrainResult) -> None:
    older = run.run / "checkpoints" / "step-000002"
    found = ec.generate(older, "line", max_tokens=3, temperature=0)
    assert found.checkpoint == older
    with pytest.raises(CheckpointError) as caught:
        ec.generate(older.with_name("step-000003"), "line")
    assert caught.value.rules == ("checkpoint-exists",)


def test_errors_come_before_any_rank(run: ec.TrainResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.api.generating._run", lambda task: pytest.fail("a rank began"))
    with pytest.raises(InfeasiblePlan) as infeasible:
        ec.generate(run, "line", settings=["mesh.tp=4"])
    assert "tp-divides-kv-heads" in infeasible.value.rules
    with pytest.raises(ConfigError) as caught:
        ec.generate(run, "")
    assert caught.value.rules == ("generate-has-prompt",)
    with pytest.raises(ConfigError) as long:
        ec.generate(run, "line", max_tokens=5000)
    assert long.value.rules == ("generate-fits-positions",)
