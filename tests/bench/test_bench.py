"""One command has every bench, and pages name benches that exist."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, listed, main

ROOT = Path(__file__).parents[2]
INNER = {"gpu.experts", "gpu.kernels", "gpu.measure", "harness.rank"}
"""Modules that a bench starts in a process of its own."""
NAMED = re.compile(r"-m bench[ .]([a-z_]+(?:\.[a-z_]+)*)")


def _module(name: str) -> str:
    return BENCHES[name].module or f"bench.{name}"


def test_every_module_with_a_command_is_a_bench() -> None:
    commands = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in (ROOT / "bench").rglob("*.py")
        if "__name__ ==" in path.read_text(encoding="utf-8")
    } - {"bench", *(f"bench.{name}" for name in INNER)}
    modules = {_module(name) for name in BENCHES}
    of_tests = {name for name in modules if name.startswith("tests.")}
    assert commands == modules - of_tests
    assert all(find_spec(name) is not None for name in of_tests)


def test_each_is_listed_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out == f"{listed()}\n"
    assert len(listed().splitlines()) == len(BENCHES)
    assert main(["trian"]) == 2
    assert "no bench is called trian" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in BENCHES if _module(name)[:6] == "bench."])
def test_a_bench_gets_its_own_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m bench"])
    monkeypatch.delitem(sys.modules, _module(name), raising=False)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_pages_name_benches_that_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/README.md"]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guides").rglob("*.md")]
    pages += [*(ROOT / "docs/compare").glob("*.md")]
    known = {*BENCHES, *(_module(name).removeprefix("bench.") for name in BENCHES)}
    named = {(page.name, name) for page in pages for name in NAMED.findall(page.read_text("utf-8"))}
    assert len(named) > 15
    assert {(page, name) for page, name in named if name not in known} == set()


def test_a_page_of_results_says_that_its_bench_is_gone() -> None:
    known = {*BENCHES, *(_module(name).removeprefix("bench.") for name in BENCHES)}
    for page in (ROOT / "bench/results").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        gone = {*NAMED.findall(text)} - known - INNER
        assert not gone or "The bench that measured it is gone" in text, (page.name, gone)
