"""Runs that leave as the checkpoint of a trainer, and go on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.core.errors import CheckpointError, ConfigError
from echelon.training.checkpoint.folder import find_checkpoint
from tests.training.small_runs import trained_run, whole_state

# Runs train here; `writers/test_formats.py` reads moments back in the default run.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ec.TrainResult:
    return trained_run(tmp_path_factory.mktemp("trained"), ["train.steps=4", "checkpoint.every=2"])


def test_a_run_goes_on_from_a_universal_folder_as_if_it_had_not_stopped(
    run: ec.TrainResult, tmp_path: Path
) -> None:
    """Weights, moments and the step: the last two steps have the same bits."""
    middle = find_checkpoint(run.run / "checkpoints/step-000002").path
    found = ec.export_weights(middle, tmp_path / "ds", to="deepspeed")
    assert (found.optimizer, found.dtype) == (True, "fp32")
    job = ["train.steps=4", f"train.weights={tmp_path / 'ds'}", "train.weights_optimizer=true"]
    (tmp_path / "again").mkdir()
    again = trained_run(tmp_path / "again", job)
    before, after = (whole_state(find_checkpoint(one.run).path) for one in (run, again))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_what_an_optimizer_needs_is_asked_for_before_a_rank_starts(
    run: ec.TrainResult, tmp_path: Path
) -> None:
    ec.export_weights(run, tmp_path / "dcp", to="dcp")
    job = ["train.steps=4", f"train.weights={tmp_path / 'dcp'}", "train.weights_optimizer=true"]
    with pytest.raises(CheckpointError, match="no exp_avg and no exp_avg_sq") as caught:
        trained_run(tmp_path, job)
    assert set(caught.value.rules) == {"weights-optimizer"}
    assert "does not say how many steps" in str(caught.value)


def test_flags_without_effect_are_refused_at_once(run: ec.TrainResult, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ec.export_weights(
            run, tmp_path / "m", to="megatron", tp=2, file_bytes=9, model_type="llama"
        )
    for key in ("--file-bytes", "--tp", "--model-type"):
        assert f"{key} has no effect with --to megatron" in str(caught.value)
    with pytest.raises(ConfigError, match="a universal folder of DeepSpeed has fp32"):
        ec.export_weights(run, tmp_path / "m", to="deepspeed", dtype="bf16")
    assert list(tmp_path.iterdir()) == []
