"""`echelon calibrate`: the least is measured on two ranks, and a run reads what was written."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.api.calibrating.machine import MachineCalibration, calibrate_machine
from echelon.api.calibrating.measuring import QUICK
from echelon.cli.calibrate import machine_json, machine_report
from echelon.config.cluster.file import read_calibration
from echelon.config.files.measurements import unfinished_file
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.launch.local.supervisor import RankPool
from tests.cost.fit.tiny_workload import TINY

WIDTH = 80


@pytest.fixture(scope="module")
def measured(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> MachineCalibration:
    """Measure this machine with two ranks of the session's."""
    out = tmp_path_factory.mktemp("measured") / "cluster.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr(
            "echelon.launch.local.supervisor.RankPool", lambda *_, **__: nullcontext(rank_pool)
        )
        work = replace(
            TINY,
            held_out=frozenset(TINY.matmuls[2:3]),
            held_out_sizes=frozenset(TINY.sizes[1:]),
        )
        return calibrate_machine(out=out, ranks=2, workload=work, steps=QUICK)


@pytest.mark.slow
def test_a_run_reads_what_was_measured(measured: MachineCalibration) -> None:
    cluster = load_job("nano", [f"cluster.file={measured.out}", "mesh.pp=1"]).plan.cluster
    assert (cluster.num_devices, cluster.backend) == (2, "gloo")
    wrote = measured.cluster
    assert cluster.name == wrote.name
    assert cluster.device.flops("fp32") == pytest.approx(wrote.device.flops("fp32"), rel=1e-5)
    assert cluster.device.efficiency.launch_s == pytest.approx(
        wrote.device.efficiency.launch_s, rel=1e-5
    )
    assert cluster.links[0].bandwidth == pytest.approx(wrote.links[0].bandwidth, rel=1e-5)
    assert cluster.links[0].latency_s > 0


def test_every_kernel_and_collective_was_measured(measured: MachineCalibration) -> None:
    beside = [one for one in measured.device.timed if one.running == 2]
    assert [one.kernel for one in beside] == list(TINY.kernels)
    assert all(one.seconds > 0 for one in measured.device.timed)
    assert measured.links is not None
    kinds = {one.collective.kind for one in measured.links.timed}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert all(one.seconds > 0 for one in measured.links.timed)


def test_the_report_fits_a_terminal(measured: MachineCalibration) -> None:
    lines = machine_report(measured).splitlines()
    assert [line for line in lines if len(line) > WIDTH and str(measured.out) not in line] == []
    assert any(line.startswith("matmul") for line in lines)
    assert any("backward" in line and "%" in line for line in lines)
    told = machine_json(measured)
    assert isinstance(told["kernels"], list)
    assert len(told["kernels"]) == len(measured.device.timed)


def test_nothing_is_overwritten_and_nothing_measured_before(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="never-overwrite"):
        calibrate_machine(out=out)
    assert out.read_text() == "mine"


def test_the_file_says_how_it_was_measured_and_how_far_off_it_is(
    measured: MachineCalibration,
) -> None:
    """S12: the error of the link model at sizes that were held out stands in the file."""
    record = read_calibration(measured.out)
    assert record is not None
    assert (record.nodes, record.ranks_per_node, record.torch) == (1, 2, torch.__version__)
    assert record.date.startswith("20")
    assert {name for name, _ in record.held_out} == {"products", "collectives", "steps"}
    assert measured.trainer is not None
    assert dict(record.held_out)["steps"] == pytest.approx(
        abs(measured.trainer.errors[-1]), abs=1e-4
    )
    told = machine_json(measured)
    assert isinstance(told["steps"], list)
    assert [one["fitted"] for one in told["steps"]] == [True, True, False]
    assert not unfinished_file(measured.out).exists()


@pytest.fixture
def on_this_pool(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "echelon.launch.local.supervisor.RankPool", lambda *_, **__: nullcontext(rank_pool)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("on_this_pool")
def test_what_was_interrupted_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "cluster.toml", list[str]()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("echelon.api.calibrating.machine.measure_trainer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calibrate_machine(out=out, ranks=2, workload=TINY, steps=QUICK, say=said.append)
    kept = len(TINY.kernels) + 10
    assert said[-1] == (
        f"{kept} measurements are kept in cluster.toml.unfinished: the same command goes on there"
    )
    assert not out.exists()
    said.clear()
    found = calibrate_machine(out=out, ranks=2, workload=TINY, steps=QUICK, say=said.append)
    assert said == [
        f"cluster.toml.unfinished: going on after {kept} measurements",
        "fitting",
        "measuring steps of 3 plans on 1 to 2 ranks",
    ]
    assert len(found.device.timed) == len(TINY.kernels)
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]


@pytest.mark.usefixtures("on_this_pool")
def test_what_is_unfinished_of_another_machine_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    out, said = tmp_path / "cluster.toml", list[str]()
    there = {"schema": 1, "machine": {"hosts": ["another"]}}
    unfinished_file(out).write_text(f"{json.dumps(there)}\n")
    with pytest.raises(ConfigError, match=r"hosts \['another'\] there") as caught:
        calibrate_machine(out=out, ranks=2, workload=TINY, say=said.append)
    assert caught.value.rules == ("calibration-continued",)
    assert said == []


@pytest.mark.parametrize("ranks", [0, -1, 1000])
def test_ranks_are_counted_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        calibrate_machine(out=tmp_path / "cluster.toml", ranks=ranks)
    assert caught.value.rules == ("ranks-to-calibrate",)
    assert caught.value.problems[0].suggestions == ("--ranks 1", "--ranks 64")
