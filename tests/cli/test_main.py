"""What is typed wrong, what goes wrong inside, and what `--help` costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from echelon import __version__
from echelon.cli import main as cli
from echelon.cli.app import build_app
from echelon.core.errors import EchelonError, Problem, RunFailed


def run_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echelon", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "rule", "works"),
    [
        (["explian"], "unknown-command", "explain"),
        (["docter"], "unknown-command", "doctor"),
        (["doctor", "--jsn"], "unknown-flag", "--json"),
        (["explain", "unknown-flag", "another"], "bad-argument", ""),
        (["explain", "unknown-flg"], "unknown-rule", "unknown-flag"),
    ],
)
def test_a_typing_mistake_exits_2_and_says_what_would_work(
    arguments: list[str], rule: str, works: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error[{rule}]: ")
    assert works in output.err
    assert f"more: echelon explain {rule}" in output.err


def test_json_asks_for_errors_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "unknown-flg", "--json"]) == 2
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["schema"], result["command"], result["error"]) == (1, "explain", True)
    assert [problem["rule"] for problem in result["problems"]] == ["unknown-rule"]
    assert output.err == ""


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["config", "show", "nanno"], "config show"),
        (["data", "show", "absent"], "data show"),
        (["plan", "nanno"], "plan"),
        (["trian"], "echelon"),
    ],
)
def test_an_error_in_json_has_the_name_that_the_result_would_have(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["command"] == name


def test_help_and_version_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr()
    assert all(name.split()[0] in output.out for name in cli.COMMANDS)
    assert output.err == ""


def test_every_problem_is_printed_once_and_plainly_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = [Problem(rule=f"rule-{i}", message=f"[{i}] is wrong " * 30) for i in range(3)]

    def fail() -> int:
        raise RunFailed(problems)

    monkeypatch.setattr("echelon.cli.doctor.doctor", fail)
    assert cli.main(["doctor"]) == 4
    assert capsys.readouterr().err == "".join(problem.render() + "\n" for problem in problems)


def test_exit_codes_follow_the_kind_of_error() -> None:
    kinds = {
        kind.__name__: kind.exit_code
        for kind in _all_errors(EchelonError)
        if kind.__module__ == EchelonError.__module__
    }
    assert kinds == {
        "ConfigError": 2,
        "InfeasiblePlan": 2,
        "DataError": 2,
        "CheckpointError": 2,
        "EnvironmentProblem": 3,
        "ProofFailed": 1,
        "RunFailed": 4,
    }


def _all_errors(base: type[EchelonError]) -> list[type[EchelonError]]:
    return [kind for child in base.__subclasses__() for kind in (child, *_all_errors(child))]


def test_a_bug_shows_its_traceback_and_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise KeyError("inside")

    monkeypatch.setattr("echelon.cli.doctor.doctor", fail)
    assert cli.main(["doctor"]) == 70
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "KeyError: 'inside'" in error
    assert "a bug in Echelon" in error


def test_ctrl_c_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("echelon.cli.doctor.doctor", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


INTERRUPTED_AT = """
import os, signal, sys

module = sys.argv.pop(1)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
from echelon.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["cyclopts", "echelon.planner.search", "numpy", "rich.console"])
def test_ctrl_c_is_one_line_while_modules_load(module: str) -> None:
    arguments = ["plan", "nano", "--cluster", "8xh100", "--pin", "tp=nothing"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AT, module, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    shell = f'"{sys.executable}" -m echelon explain 2>"{log}" | head -n 1'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout != ""
    assert log.read_text() == ""


def test_the_module_runs_as_the_script_does() -> None:
    done = run_child("--version")
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


def test_help_of_every_command_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from echelon.cli.main import COMMANDS, main\n"
        "codes = {main([*name.split(), '--help']) for name in COMMANDS} | {main(['--help'])}\n"
        "print('torch' in sys.modules, codes, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "False {0}"


def test_no_command_has_more_than_twelve_flags() -> None:
    app = build_app()
    for name in cli.COMMANDS:
        found = app
        for word in name.split():
            found = found[word]
        arguments = found.assemble_argument_collection()
        # What is named by its place, as RUN is, is no flag.
        flags = [one for one in arguments if one.field_info.kind.name != "POSITIONAL_ONLY"]
        assert arguments, name
        assert len(flags) <= 12, name
