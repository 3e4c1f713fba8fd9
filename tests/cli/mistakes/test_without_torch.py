"""Without torch, each command that needs it says so in one error; the others work."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

BLOCKER = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
"""
NEED_TORCH = (
    "train nano",
    "prove nano",
    "prove --module model.py:make",
    "prove --subject program.py",
    "rehearse nano",
    "generate runs/nano",
    "calibrate",
    "export weights runs/nano --out weights",
)
NEED_NONE = (
    "plan nano",
    "config show nano",
)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose `sitecustomize` keeps every process from importing torch."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    (folder / "model.py").write_text("def make(): ...\n")
    program = "MESH = {}\ndef one_device(): ...\ndef on_rank(): ...\n"
    (folder / "program.py").write_text(program)
    return folder


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "echelon", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_one_error_says_what_to_install(without_torch: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda command: run(without_torch, command), NEED_TORCH))
    for command, one in zip(NEED_TORCH, done, strict=True):
        assert one.returncode == 3, (command, one.stderr)
        assert "Traceback" not in one.stderr, (command, one.stderr)
        assert one.stderr.count("error[") == 1, (command, one.stderr)
        assert "error[package-installed]" in one.stderr, (command, one.stderr)
        assert "needs the package torch" in one.stderr
        assert "[train]'" in one.stderr
    assert not (without_torch / "runs").exists()


def test_a_plan_needs_none(without_torch: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda command: run(without_torch, command), NEED_NONE))
    assert [one.returncode for one in done] == [0] * len(NEED_NONE), [one.stderr for one in done]
