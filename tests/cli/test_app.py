"""The commands and their parser: help, and how what goes wrong is said."""

from __future__ import annotations

import json

import pytest

from echelon import __version__
from echelon.cli import main as cli
from echelon.cli.app import COMMANDS
from echelon.core.errors import EchelonError, Problem, RunFailed


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
    assert all(name.split()[0] in output.out for name in COMMANDS)
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
        "Interrupted": 130,
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


@pytest.mark.parametrize(
    ("typed", "works"),
    [
        ("plan", "echelon plan llama3-8b --cluster 8xh100 or echelon plan --help"),
        ("calibrate merge", "echelon calibrate merge A.toml B.toml --out C.toml"),
        ("plan nano --tp 2", "--set mesh.tp=..."),
        ("plan nano --sequence-length 2", "--set batch.sequence_length=..."),
        ("plan nano --batch 2", "--set batch."),
        ("plan nano --clutser 8xh100", "--cluster"),
    ],
)
def test_what_is_missing_or_no_flag_is_shown_as_it_would_work(
    typed: str, works: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed.split()) == 2
    assert f"works here: {works}" in capsys.readouterr().err
