"""`echelon prove` shows every claim, and exits 1 with the factor where one does not hold."""

from __future__ import annotations

import json

import pytest

from echelon.cli.main import main
from echelon.prove.claims import CLAIMS

SPLIT = ["--set", "mesh.tp=2", "--set", "mesh.sequence_parallel=true"]
WRONG = ["--subject", "tests.cli.wrong_subject:build"]


def test_a_plan_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", *SPLIT]) == 0
    output = capsys.readouterr()
    assert all(claim.statement in output.out for claim in CLAIMS)
    assert "FAILS" not in output.out
    assert output.out.endswith("\nproven\n")
    assert output.err == "proving nano on 2 ranks beside one process ...\n"


def test_json_holds_the_whole_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", *SPLIT, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["command"], result["proven"]) == (1, "prove", True)
    assert [one["precision"] for one in result["proof"]["passes"]] == ["fp64", "fp32"]


def test_a_wrong_engine_is_found_with_its_factor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", *WRONG]) == 1
    output = capsys.readouterr()
    assert output.out.endswith("\nNOT PROVEN\n")
    wrong = [line for line in output.out.splitlines() if "FAILS" in line]
    assert wrong
    assert all(line.startswith("every gradient before clipping") for line in wrong)
    assert "error[prove-gradients]" in output.err
    assert "first wrong: " in output.err


def test_a_wrong_engine_exits_1_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", *WRONG, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["proven"] is False
    assert result["proof"]["passes"][0]["diagnosis"]["factor"] == "2"


def test_an_engine_that_cannot_be_imported_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", "--subject", "tests.cli.absent:build"]) == 2
    assert "error[prove-subject]" in capsys.readouterr().err


def test_a_model_that_cannot_be_trained_yet_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["prove", "mixtral-8x7b"]) == 2
    assert capsys.readouterr().err.startswith("error[not-built-yet]")
