"""What a user may get wrong about ZeRO, typed as a user would: one error, no process started."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from echelon.cli.main import main
from tests.parallel.offload.test_file_store import mounted
from tests.training.small_runs import TINY, checkpoint_of

SHARD2 = ("mesh.dp_shard=2", "zero.stage=3")
FILES = (*SHARD2, "zero.optimizer_offload=nvme", "zero.parameter_offload=nvme")
COMMANDS = ("plan", "train", "prove")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of its own, with a text to train on."""
    lines = [f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)]
    (tmp_path / "words.txt").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without_processes(*command: str) -> int:
    """Return the exit code of a command, which fails the test where it starts a process."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((subprocess, "Popen"), (os, "fork"), (os, "posix_spawn")):
            patch.setattr(module, name, started)
        return main(command)


def words(settings: Sequence[str]) -> list[str]:
    """Return the flags of a tiny run; `settings` win over those of all tiny runs."""
    keys = {setting.split("=")[0] for setting in settings}
    kept = [one for one in ("data.source=words.txt", *TINY) if one.split("=")[0] not in keys]
    return [word for one in (*kept, *settings) for word in ("--set", one)]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("settings", "rule", "told"),
    [
        (("mesh.dp_shard=2", "zero.stage=4"), "out-of-range", ("from 0 to 3", "3")),
        (("mesh.dp_shard=2", "zero.stage=-1"), "out-of-range", ("from 0 to 3", "0")),
        (("mesh.dp_shard=2", "zero.stage=2.5"), "wrong-type", ("from 0 to 3", "2 or 3")),
        (("mesh.dp_shard=2", "zero.stage=two"), "wrong-type", ("from 0 to 3", "")),
        (
            ("mesh.dp_replicate=2", "zero.optimizer_offload=host"),
            "offload-needs-stage",
            ("stage 0 < 1", "zero.stage = 1"),
        ),
        (
            ("mesh.dp_shard=2", "zero.stage=2", "zero.parameter_offload=host"),
            "offload-needs-stage",
            ("stage 2 < 3", "zero.stage = 3"),
        ),
        (FILES, "nvme-needs-folder", ("names no folder", 'zero.offload_dir = "DIR"')),
        (
            (*SHARD2, "zero.offload_dir=fast"),
            "no-effect",
            ("nothing rests in files", 'zero.optimizer_offload = "nvme"'),
        ),
        (("zero.stage=3",), "zero-shares-out", ("= 1 rank", "mesh.dp_shard = 2")),
        (
            (*SHARD2, "precision.parameters=fp16"),
            "fp16-needs-loss-scaling",
            ("gradients below 6e-8 are zero", 'precision.loss_scaling = "dynamic"'),
        ),
        (
            (*SHARD2, "precision.parameters=bf16", "precision.loss_scaling=dynamic"),
            "no-effect",
            ("no gradient is fp16", 'precision.loss_scaling = "none"'),
        ),
        (
            (*SHARD2, "zero.bucket_bytes=1048576"),
            "no-effect",
            ("at stage 3 a bucket is a unit", 'zero.bucket_bytes = "auto"'),
        ),
        (
            ("mesh.dp_shard=2", "zero.stage=1", "zero.bucket_bytes=0"),
            "out-of-range",
            ("zero.bucket_bytes", ""),
        ),
    ],
)
def test_settings_that_cannot_be_are_one_error(
    command: str,
    settings: tuple[str, ...],
    rule: str,
    told: tuple[str, str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert without_processes(command, "nano", *words(settings)) == 2
    output = capsys.readouterr()
    assert output.err.count("error[") == 1
    assert output.err.startswith(f"error[{rule}]: ")
    message, works = told
    assert message in output.err
    assert f"works here: {works}" in output.err or not works
    assert "set by: " in output.err
    assert f"more: echelon explain {rule}" in output.err
    assert "Traceback" not in output.err + output.out
    assert sorted(path.name for path in folder.iterdir()) == ["words.txt"]


@pytest.mark.parametrize("command", ["train", "prove"])
@pytest.mark.parametrize(
    ("case", "rule", "told"),
    [
        ("missing", "offload-folder-exists", "does not exist"),
        ("a file", "offload-folder-exists", "is not a folder"),
        ("read-only", "offload-folder-writable", "Read-only file system (EROFS)"),
        ("small", "offload-space", "the slices of the ranks of this machine take"),
        ("full", "offload-space", "No space left on device (ENOSPC)"),
    ],
)
def test_a_folder_that_takes_no_files_is_told_before_any_rank_starts(
    command: str,
    case: str,
    rule: str,
    told: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fast = folder / "fast"
    command_line = [command, "nano", *words((*FILES, f"zero.offload_dir={fast}"))]
    with ExitStack() as mounts:
        if case == "a file":
            fast.touch()
        elif case != "missing":
            fast.mkdir()
            mounts.enter_context(mounted("ro" if case == "read-only" else "size=64k", fast))
        if case == "full":
            (fast / "filler").write_bytes(bytes(65536))
        code = without_processes(*command_line)
    assert code == 3
    error = capsys.readouterr().err
    assert error.count("error[") == 1
    assert f"error[{rule}]: " in error
    assert told in error
    assert str(fast) in error
    assert 'zero.optimizer_offload = "host"' in error
    assert not (folder / "runs").exists()
    if command == "train":
        assert f"set by: --set zero.offload_dir={fast}" in error


def test_a_plan_may_name_a_folder_of_another_machine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = words((*FILES, "zero.offload_dir=/mnt/elsewhere"))
    assert without_processes("plan", "nano", *flags, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert "/mnt/elsewhere" in json.dumps(plan)


@pytest.mark.slow
def test_a_bucket_smaller_than_a_parameter_trains_and_is_proven(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = words(("mesh.dp_shard=2", "zero.stage=2", "zero.bucket_bytes=16", "train.steps=2"))
    assert main(["prove", "nano", *flags]) == 0
    capsys.readouterr()
    assert main(["train", "nano", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_other_mathematics_are_not_gone_on_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = (*SHARD2, "train.steps=2")
    assert main(["train", "nano", *words(first)]) == 0
    assert checkpoint_of(folder / "runs/nano", 2).is_dir()
    capsys.readouterr()
    for setting, told in (
        ("optimizer.kind=sgd", "optimizer.kind was 'adamw', is 'sgd'"),
        ("optimizer.kind=muon", "optimizer.kind was 'adamw', is 'muon'"),
        ("precision.master=fp64", "precision.master was 'fp32', is 'fp64'"),
        ("precision.parameters=bf16", "precision.parameters was 'fp32', is 'bf16'"),
    ):
        flags = ["train", "nano", *words((*first, setting)), "--resume", "runs/nano"]
        assert without_processes(*flags) == 2
        error = capsys.readouterr().err
        assert error.count("error[") == 1
        assert "error[checkpoint-same-mathematics]: runs/nano/checkpoints/step-000002 " in error
        assert told in error
    assert not (folder / "runs/nano-2").exists()


def test_a_key_of_deepspeed_that_is_not_honoured_is_named_and_the_run_file_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    (folder / "ds.json").write_text(json.dumps(config))
    code = without_processes("import", "ds.json", "--ranks", "2", "--out", "run.toml")
    output = capsys.readouterr()
    assert code == 1
    assert "zero_hpz_partition_size" in output.out
    assert output.err.count("error[") == 0
    assert "1 refused: it would change the mathematics" in output.err
    assert (
        "# - [import-not-honoured] zero_optimization.zero_hpz" in (folder / "run.toml").read_text()
    )
