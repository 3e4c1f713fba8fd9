"""Each thing that a machine may lack is found, named by its rule, and judged by what it stops."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from echelon.cli import doctor as machine
from echelon.cli.doctor import MachineCheck
from echelon.cli.main import main
from echelon.core.optional import install_command
from echelon.launch import host

Usage = namedtuple("Usage", "total used free")


def rule(finding: MachineCheck) -> str | None:
    return finding.problem.rule if finding.problem else None


def only(findings: Iterable[MachineCheck], name: str) -> MachineCheck:
    return next(finding for finding in findings if finding.name == name)


def test_a_working_machine_is_described_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["ok"]) == (1, True)
    found = result["findings"]
    assert found["torch"]["version"] == torch.__version__
    assert found["python"]["executable"] == sys.executable
    assert found["backends"]["gloo"] is True
    assert 0 < found["cores"]["usable"] <= found["cores"]["total"]
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]


def test_text_has_one_line_for_each_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(machine.examine_machine(Path.cwd())))


def test_a_machine_without_torch_exits_3_and_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 3
    output = capsys.readouterr()
    assert "NO  torch" in output.out
    assert "error[torch-installed]" in output.err
    assert install_command("train") in output.err
    assert main(["doctor", "--json"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert [problem["rule"] for problem in result["problems"]] == ["torch-installed"]


def test_an_old_python_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert rule(machine.python()) == "python-version"


def test_an_old_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu126")
    found = only(machine.torch_and_backends(needs_nccl=False), "torch")
    assert rule(found) == "torch-version"
    assert found.stops_runs


@pytest.mark.parametrize(("needs_nccl", "stops"), [(False, True), (True, False)])
def test_a_missing_backend_stops_what_needs_it(
    needs_nccl: bool, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: needs_nccl)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = only(machine.torch_and_backends(needs_nccl=needs_nccl), "backends")
    assert rule(found) == "backend-available"
    assert found.stops_runs is stops


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 2**29)
    found = machine.memory()
    assert rule(found) == "enough-memory"
    assert not found.stops_runs


def test_more_ranks_than_memory_holds_are_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: host.START_BYTES + 2**26)
    assert main(["prove", "nano", "--set", "mesh.dp_replicate=4"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error[enough-memory]: 4 ranks")
    assert "a mesh of up to 2 ranks" in error


@pytest.mark.parametrize(("nccl", "expected"), [(True, "shared-memory"), (False, None)])
def test_little_shared_memory_matters_to_nccl_only(
    nccl: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    assert rule(machine.shared_memory(needed_by_nccl=nccl, path=tmp_path)) == expected


def test_a_system_without_shared_memory_is_fine(tmp_path: Path) -> None:
    assert rule(machine.shared_memory(needed_by_nccl=True, path=tmp_path / "absent")) is None


def test_a_machine_that_forbids_listening_stops_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(socket, "create_server", refuse)
    found = machine.ports()
    assert rule(found) == "port-available"
    assert found.stops_runs


def test_an_interface_that_does_not_exist_stops_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent9")
    found = machine.gloo_interface()
    assert rule(found) == "gloo-interface"
    assert found.stops_runs
    assert found.problem is not None
    assert "lo" in " ".join(found.problem.suggestions)


def test_a_host_name_that_leads_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # 203.0.113.0/24 is for documentation: no machine has it.
    assert rule(machine.gloo_interface(lambda _: "203.0.113.1")) == "gloo-interface"
    assert rule(machine.gloo_interface(lambda _: "127.0.0.1")) is None


@pytest.mark.parametrize(("free", "expected"), [(2**20, "disk-space"), (2**40, None)])
def test_a_full_disk_is_found(
    free: int, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**41, 0, free))
    assert rule(machine.disk(tmp_path)) == expected


def test_a_container_quota_lowers_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "first_words", lambda path: ["50000", "100000"])
    assert host.num_usable_cores() == 0.5


def test_what_ranks_on_gpus_get_is_shown_with_what_was_set_here() -> None:
    mine = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "HOME": "/x"}
    found = machine.gpu_variables(mine, used=True)
    assert found.facts["set"] == {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    assert "PYTORCH_CUDA_ALLOC_CONF=backend:native (set here)" in found.text
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in found.text
    assert "PYTORCH_ALLOC_CONF=" not in found.text.replace("PYTORCH_CUDA_ALLOC_CONF=", "")
    assert machine.gpu_variables({}, used=False).text == "6 for ranks on GPUs; there are none here"
