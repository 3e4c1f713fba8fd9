"""`echelon plan MODEL --cluster`: its page, its object, its file, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from echelon.cli.explain.command import search_schema
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.plan import Plan
from echelon.planner.search import search as searching
from echelon.planner.search.sweep import SearchSweep

FAST = ["plan", "nano", "--cluster", "8xh100"]


def check(value: object) -> None:
    """Raise where an object is not of the published schema."""
    Draft202012Validator(search_schema()).validate(value)  # type: ignore[reportUnknownMemberType]


def test_the_schema_is_published_by_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == search_schema()
    Draft202012Validator.check_schema(search_schema())
    assert main(["plan", "--help"]) == 0
    assert "echelon explain json" in capsys.readouterr().out


def test_the_winner_is_written_once_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plan = tmp_path / "best.toml", tmp_path / "best.json"
    assert main([*FAST, "--json", "--out", str(run)]) == 0
    best = json.loads(capsys.readouterr().out)["search"]["plans"][0]["plan"]
    assert load_job(run).plan == Plan.from_json(json.dumps(best))
    assert main([*FAST, "--out", str(plan)]) == 0
    assert Plan.read(plan) == load_job(run).plan
    before = run.read_text()
    assert main([*FAST, "--out", str(run)]) == 2
    assert "error[never-overwrite]" in capsys.readouterr().err
    assert run.read_text() == before


def test_a_run_file_is_searched_on_its_own_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text('extends = "nano"\n[cluster]\npreset = "4xcpu"\n[mesh]\ntp = 2\n')
    assert main(["plan", str(run), "--search", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert (found["cluster"], found["plans"][0]["devices"]) == ("4xcpu", 4)
    assert main(["plan", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["layout"]["mesh"]["tp"] == 2


@pytest.mark.parametrize(
    ("arguments", "rule", "works"),
    [
        (["lama3-8b", "--cluster", "8xh100"], "unknown-preset", "llama3-8b"),
        (["nano", "--cluster", "8xh10"], "unknown-preset", "8xh100"),
        (["nano", "--cluster", "8xh100", "--pin", "tq=8"], "unknown-pin", "tp"),
        (["nano", "--cluster", "8xh100", "--pin", "tp=3"], "pin-excludes-everything", "--pin tp=1"),
        (["nano", "--cluster", "8xh100", "--objective", "cost"], "objective-needs-price", "2.5"),
        (["nano", "--cluster", "8xh100", "--trainer", "genric"], "unknown-trainer", "generic"),
        (["nano", "--cluster", "8xh100", "--price", "nan"], "bad-argument", "--price 2.5"),
        (["nano", "--cluster", "8xh100", "--price", "inf"], "bad-argument", "--price 2.5"),
        (["nano", "--cluster", "8xh100", "--price=-1"], "bad-argument", "--price 2.5"),
        (["nano", "--cluster", "8xh100", "--out", "x.yaml"], "bad-argument", "--out x.toml"),
        (["nano", "--pin", "tp=2"], "bad-argument", "--search"),
        (["nano", "--out", "best.toml"], "bad-argument", "--cluster"),
        (["nano", "--objective", "throughput"], "bad-argument", "--search"),
        (
            ["nano", "--cluster", "8xh100", "--pin", "tp=2", "--pin", "tp=4"],
            "bad-argument",
            "tp=2,4",
        ),
    ],
)
def test_what_is_wrong_exits_2_with_what_works(
    arguments: list[str], rule: str, works: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert "\nrun " not in output.out
    assert output.err.startswith(f"error[{rule}]: ")
    assert works in output.err


@pytest.mark.parametrize(
    ("arguments", "rule", "set_by"),
    [
        (["llama3-8b", "--cluster", "8xfoo"], "unknown-preset", "--cluster 8xfoo"),
        (["llama3-8b", "--cluster", "no.toml"], "no-such-file", "--cluster no.toml"),
        (["llama3-8b", "--cluster", ""], "out-of-range", "--cluster ''"),
        (["nano", "--cluster", "0xh100"], "unknown-preset", "--cluster 0xh100"),
        (["no.json", "--cluster", "8xh100"], "no-such-file", "no.json"),
        (["other.json", "--cluster", "8xh100"], "hf-config-model-type", "other.json"),
        (
            ["nano", "--cluster", "8xh100", "--set", "cluster.preset=8xa100"],
            "conflicting-settings",
            "--cluster 8xh100, --set cluster.preset=8xa100",
        ),
    ],
)
def test_an_error_names_what_was_typed(
    arguments: list[str],
    rule: str,
    set_by: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text('{"model_type": "other"}')
    assert main(["plan", *arguments, "--json"]) == 2
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert (problem["rule"], problem["set_by"]) == (rule, set_by)


def test_what_was_asked_for_is_printed_before_anything_is_searched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def looked(*_: object) -> None:
        told.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "walk_worlds", looked)
    assert main(FAST) == 130
    assert told[0].startswith("model     nano")
    assert "batch     16 sequences" in told[0]


def test_an_interrupt_prints_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = SearchSweep._look
    calls: list[int] = []

    def once(self: SearchSweep, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        look(self, *arguments)

    monkeypatch.setattr(SearchSweep, "_look", once)
    assert main(["plan", "llama3-8b", "--cluster", "64xh100", "--json"]) == 130
    output = capsys.readouterr()
    result = json.loads(output.out)
    check(result)
    assert result["search"]["interrupted"] is True
    assert result["search"]["plans"]
    assert "met before the interrupt; there may be better ones" in output.err
    monkeypatch.setattr(
        searching, "walk_worlds", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert main(FAST) == 130
    heading = capsys.readouterr().out
    assert heading.startswith("model     nano")
    assert "\nrun " not in heading


INTERRUPTED = """
import os, signal, sys
from echelon.cli.main import main
from echelon.planner.search.sweep import SearchSweep

look, calls = SearchSweep._look, []

def looking(self, *arguments):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    look(self, *arguments)

signal.signal(signal.SIGINT, signal.default_int_handler)
SearchSweep._look = looking
sys.exit(main())
"""


def test_a_signal_prints_the_best_so_far() -> None:
    arguments = ["plan", "llama3-8b", "--cluster", "64xh100"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert "first     64 ranks" in done.stdout
    *_, line, told = done.stderr.splitlines()  # behind the progress of a slow search
    assert line == "interrupted"
    assert told.endswith("met before the interrupt; there may be better ones")


@pytest.mark.slow
def test_a_search_needs_no_torch() -> None:
    code = "import sys; from echelon.cli.main import main; main(sys.argv[1:]); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *FAST], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")
