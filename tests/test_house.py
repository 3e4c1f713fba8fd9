"""The house rules that no linter knows: sizes, names, what an import loads, what has a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import echelon
from echelon.core.rulebook import all_rules

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
TEXT = {".py", ".ts", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".json", ".html", ".sh", ""}
NOT_OURS = {"runs", "node_modules", "dist", "build", "__pycache__"}

# A home or workplace of some machine, written so that this line is not one.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:hom[e]|roo[t]|wor[k]|User[s]|far[m])/\w")


def _files(*suffixes: str) -> Iterator[Path]:
    for folder, inner, names in os.walk(ROOT):
        inner[:] = sorted(name for name in inner if _is_ours(name))
        # In a worktree .git is a file that names where the repository lies.
        for name in sorted(set(names) - {".git"}):
            path = Path(folder, name)
            if path.is_file() and path.suffix in (suffixes or TEXT):
                yield path


def _is_ours(folder: str) -> bool:
    return folder == ".ci" or not (folder.startswith(".") or folder in NOT_OURS)


def _run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in _files(".py", ".ts")
    }
    assert len(lengths) > 20
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_the_order_in_which_a_plan_is_applied_fits_one_look() -> None:
    text = (ROOT / "src/echelon/parallel/apply.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80


def test_source_is_ascii() -> None:
    assert [str(path) for path in _files(".py") if not path.read_bytes().isascii()] == []


def test_no_file_names_a_path_of_some_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in _files()
        for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import echelon",
        "import echelon; dir(echelon)",
    ],
)
def test_no_torch_is_imported_by(code: str) -> None:
    assert _run_python(f"{code}\nimport sys; print('torch' in sys.modules)") == "False\n"


def test_the_exported_names_are_these() -> None:
    assert echelon.__all__ == [
        *("EchelonError", "Plan", "__version__"),
        *("calibrate", "calibrate_machine", "calibrate_run", "compare", "export", "import_run"),
        *("observe_schedule", "parallelize", "plan", "prove", "train"),
    ]


def test_rule_ids_are_unique() -> None:
    ids = [rule.id for rule in all_rules()]
    assert sorted(set(ids)) == sorted(ids)


def test_every_rule_has_a_test() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in _files(".py")
        if path.is_relative_to(ROOT / "tests")
    )
    named = set(re.findall(r"""["'\[]([a-z0-9-]+)["'\]]""", tests))
    assert [rule.id for rule in all_rules() if rule.id not in named] == []


def test_every_package_has_a_floor() -> None:
    contract = (ROOT / ".importlinter").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "src/echelon").glob("*/__init__.py")]
    assert "core" in packages
    assert [name for name in packages if not re.search(rf"\b{name}\b", contract)] == []
