"""Times of units, measured: the run's own executor and kernels, one tensor rank's share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from echelon.cli.main import main
from echelon.config.files.measurements import PASSES, UNITS, fitted_settings, read_times
from echelon.config.load import load_job
from echelon.core.mesh import Mesh
from echelon.cost.seconds.kernels import model_flops_per_token
from echelon.launch.context import RankContext, RankProgress
from echelon.schedule.action import ActionKind
from echelon.schedule.check import check_schedule
from echelon.schedule.from_plan import schedule_from_plan
from echelon.training.engine import TrainEngine
from echelon.training.measure import trainer as module
from echelon.training.measure.trainer import (
    MICROBATCHES,
    StepsJob,
    measure_units,
    take_steps,
    unit_plan,
    with_rows,
)
from tests.parallel.layouts import plan_of

SMALL = ("model.layers=3", "model.hidden=32", "model.head_dim=8", "model.ffn=64")
SETS = (*SMALL, "batch.sequence_length=16", 'model.name="small"')


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: several of tiny products only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_unit_plan_is_one_tensor_ranks_share_of_a_block() -> None:
    plan = load_job("nano", [*SETS, "mesh.pp=3", "mesh.tp=2", "recompute.policy=full"]).plan
    small = unit_plan(plan)
    assert small.mesh == Mesh()
    model = small.model
    assert (model.layers, model.hidden, model.heads, model.kv_heads) == (1, 32, 2, 1)
    assert (model.head_dim, model.ffn, model.vocab) == (8, 32, 129)
    assert small.layout.recompute.policy == "none"
    assert small.num_microbatches == MICROBATCHES
    whole = replace(plan.model, layers=1, vocab=258)
    half = model_flops_per_token(model, 16) / model_flops_per_token(whole, 16)
    assert half == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("split", [True, False])
def test_its_actions_are_a_schedule(split: bool) -> None:
    plan = with_rows(unit_plan(load_job("nano", SETS).plan), split=split)
    schedule = schedule_from_plan(plan)
    report = check_schedule(schedule)
    assert report.num_messages == 0
    assert report.peak_in_flight_per_rank == (3,)
    kinds = {action.kind for action in schedule.actions[0]}
    halves = {ActionKind.B, ActionKind.W} if split else {ActionKind.BW}
    assert kinds == {ActionKind.F, *halves}


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("run", ["llama", "gpt2"])
def test_every_pass_of_every_unit_is_timed(run: str, tied: str) -> None:
    kinds = ("model.norm=layernorm", "model.positions=learned", "model.gated=false")
    more = (*kinds, "model.activation=gelu", "model.mlp_bias=true") if run == "gpt2" else ()
    plan = load_job("nano", [*SETS, *more, f"model.tied={tied}"]).plan
    times = measure_units(plan, torch.device("cpu"), seconds=0.0)
    assert set(times.seconds) == set(UNITS)
    for unit in UNITS:
        assert set(times.seconds[unit]) == set(PASSES)
        assert times.seconds[unit]["forward_s"] > 0
        assert times.seconds[unit]["backward_s"] > 0
        assert times.spread[unit] >= 0
    assert times.fits == fitted_settings(plan)
    assert times.threads == torch.get_num_threads()


@pytest.mark.slow
def test_calibrate_writes_a_file_that_a_plan_reads_and_never_writes_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    flags = [word for setting in (*SETS, "mesh.pp=3") for word in ("--set", setting)]
    before = torch.get_num_threads()
    assert main(["calibrate", "nano", "--out", str(out), *flags, "--json"]) == 0
    assert torch.get_num_threads() == before
    result = json.loads(capsys.readouterr().out)
    found = read_times(out)
    assert result["seconds"] == found.seconds
    job = load_job("nano", [*SETS, "mesh.pp=3", f"pipeline.times={out}"])
    assert "balanced by measured times" in job.source_of("pipeline.stages")
    text = out.read_text()
    assert main(["calibrate", "nano", "--out", str(out), *flags]) == 2
    error = capsys.readouterr().err
    assert "error[unit-times-written-once]" in error
    assert f"--out {tmp_path / 'times-2.json'}" in error
    assert out.read_text() == text


@pytest.mark.slow
def test_calibrate_shows_a_row_for_each_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    flags = [word for setting in SETS for word in ("--set", setting)]
    assert main(["calibrate", "nano", "--out", str(out), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(UNITS)] == list(UNITS)
    assert lines[-1].endswith(f'--set pipeline.times="{out}"')


def test_a_model_that_is_not_trained_yet_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "times.json"
    sets = ("activation=gelu", "experts.num_experts=4", "experts.top_k=2", "experts.ffn=64")
    flags = [word for one in sets for word in ("--set", f"model.{one}")]
    assert main(["calibrate", "nano", "--out", str(out), *flags]) == 2
    assert "error[not-built-yet]" in capsys.readouterr().err
    assert not out.exists()


def test_half_precision_is_measured_too() -> None:
    plan = load_job("nano", [*SETS]).plan
    numbers = replace(plan.mathematics.precision, parameters="bf16")
    plan = replace(plan, mathematics=replace(plan.mathematics, precision=numbers))
    times = measure_units(plan, torch.device("cpu"), seconds=0.0)
    assert times.fits["precision.parameters"] == "bf16"


def test_the_median_is_that_of_the_steps_after_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps that warm up are not ended by a look at the clock; the others take 4, 1 and 3.
    looks = [0.0, 100.0, 200.0, 204.0, 210.0, 211.0, 220.0, 223.0]
    barriers: list[int] = []
    losses: list[float] = []
    step = TrainEngine.step

    def noted(self: TrainEngine, *arguments: Any) -> Any:
        result = step(self, *arguments)
        losses.append(result.loss)
        return result

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: looks.pop(0)))
    monkeypatch.setattr(module.dist, "barrier", lambda: barriers.append(len(looks)))
    monkeypatch.setattr(TrainEngine, "step", noted)
    context = RankContext(
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        store=cast("Any", None),
        progress=RankProgress(),
    )
    assert take_steps(context, StepsJob(plan=plan_of(), warmup=2, steps=3)) == 3.0
    assert barriers == [8, 7, 6, 4, 2]  # all ranks meet, then the clock is read
    assert context.progress.doing == "step 4"
    # One batch over and over: it is learned.
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
