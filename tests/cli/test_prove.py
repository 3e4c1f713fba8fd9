"""`echelon prove` shows every claim, and exits 1 with the factor where one does not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.cli.main import main
from echelon.proof.claims.claims import CLAIMS, RACE_CLAIMS
from echelon.proof.claims.plan_evidence import PlanEvidence
from echelon.proof.independent.comparison import BALANCE, COMPARISONS, ROUTES
from tests.proof.verify.planted_programs import written

SPLIT = ["--set", "mesh.tp=2", "--set", "mesh.sequence_parallel=true"]
SPARSE = [
    word
    for setting in (
        "model.experts.num_experts=4",
        "model.experts.top_k=2",
        "model.experts.ffn=32",
        "experts.balance=both",
        "experts.z_coefficient=0.001",
        "mesh.dp_shard=2",
        "mesh.ep=2",
    )
    for word in ("--set", setting)
]
ABOUT_EXPERTS = {
    "each token goes to the experts that it goes to on one device",
    "loads and drops of experts are those of the global batch",
    "auxiliary and z-loss of the global batch, on every rank",
    "biases of routers, and shares of loads, after every step",
}
NARROW_ONLY = {
    claim.statement
    for claim in CLAIMS
    if claim.rule.id in ("prove-systematic-error", "prove-sum-dtype", "prove-range")
}
"""What is claimed of bf16 and fp16 alone."""
ABOUT_ISLANDS = {
    claim.statement
    for claim in CLAIMS
    if claim.rule.id in ("prove-outer-step", "prove-islands-agree")
}
"""What is claimed of islands of local SGD alone."""
OF_PLANS = [claim for claim in CLAIMS if issubclass(PlanEvidence, claim.needs)]
WRONG = ["--subject", "tests.cli.wrong_subject:build"]


@pytest.mark.quick("False")
@pytest.mark.parametrize("experts", [False, True])
def test_a_plan_is_proven(capsys: pytest.CaptureFixture[str], experts: bool) -> None:
    settings = SPARSE if experts else [*SPLIT, "--late"]
    assert main(["prove", "nano", *settings]) == 0
    output = capsys.readouterr()
    shown = {claim.statement for claim in OF_PLANS if claim.statement in output.out}
    # What is about master copies is left out of a plan that has none, and so with experts.
    without = {
        "parameters are the rounding of their master copies",
        "what is frozen has the bits that it began with, and no gradient",
    }
    without |= NARROW_ONLY | ABOUT_ISLANDS
    late = {*RACE_CLAIMS, CLAIMS[-1]}
    without |= {claim.statement for claim in late} if experts else ABOUT_EXPERTS
    assert {claim.statement for claim in OF_PLANS} - shown == without
    assert "FAILS" not in output.out
    assert output.out.endswith("\nproven\n")
    assert output.err == "proving nano on 2 ranks beside one process ...\n"


def test_the_one_process_is_compared_with_an_independent_implementation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["prove", "nano", "--independent"]) == 0
    text = capsys.readouterr().out.partition("beside an independent implementation")[2]
    shown = [statement for statement in COMPARISONS if statement in text]
    assert shown == [one for one in COMPARISONS if one not in (ROUTES, BALANCE)]
    assert text.endswith("\nproven\n")


def test_exported_weights_are_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", "--export"]) == 0
    text = capsys.readouterr().out.partition("a whole run of the trainer")[2]
    assert "logits of exported weights, as other libraries read them" in text
    assert "hf of llama" in text
    assert text.endswith("\nproven\n")


APART = ("mesh.dp_replicate=2", "servers.count=2", "servers.updates=asynchronous")


@pytest.mark.parametrize(
    "flags",
    [["--subject", "tests.proof.toy:build"], [f for value in APART for f in ("--set", value)]],
)
def test_exports_without_a_whole_run_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(["prove", "nano", "--export", *flags]) == 2
    assert "exports end a whole run" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--set", "precision.parameters=bf16")])
def test_a_quick_proof_says_what_it_leaves_out(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", "nano", "--set", "mesh.tp=2", "--quick", *flags]) == 0
    dtype = "bf16" if flags else "fp32"
    page = " ".join(capsys.readouterr().out.split())
    left_out = f"{dtype}, 2 of 5 steps, a whole run of the trainer"
    assert f"A quick proof. It leaves out {left_out}." in page
    assert "3 steps, seed 0" in page
    assert main(["prove", "nano", "--set", "mesh.tp=2", "--quick", "--json", *flags]) == 0
    proof = json.loads(capsys.readouterr().out)["proof"]
    assert proof["left_out"] == [dtype, "2 of 5 steps", "a whole run of the trainer"]
    assert (proof["num_steps"], proof["whole_run"]) == (3, None)
    assert [judged["precision"] for judged in proof["passes"]] == ["fp64"]


@pytest.mark.parametrize("flag", ["--bisect", "--independent", "--export"])
def test_a_quick_proof_has_nothing_for_the_flags_of_a_whole_one(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", "nano", "--quick", flag]) == 2
    assert "--quick leaves out the parts" in capsys.readouterr().err


@pytest.mark.slow
def test_json_holds_the_whole_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", *SPLIT, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["command"], result["proven"]) == (1, "prove", True)
    assert [one["precision"] for one in result["proof"]["passes"]] == ["fp64", "fp32"]
    assert result["proof"]["independent"] is None


def test_a_wrong_engine_is_found_with_its_factor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", *WRONG]) == 1
    output = capsys.readouterr()
    assert output.out.endswith("\nNOT PROVEN\n")
    wrong = [line for line in output.out.splitlines() if "FAILS" in line]
    assert wrong
    assert all(line.startswith("every gradient before clipping") for line in wrong)
    assert "error[prove-gradients]" in output.err
    assert "first wrong: " in output.err


@pytest.mark.slow
def test_the_smallest_run_that_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", "--set", "mesh.tp=2", *WRONG, "--bisect", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["bisection"]
    assert found["rule"] == "prove-gradients"
    assert found["sizes"] == {"ranks": 1, "blocks": 1, "microbatches": 1, "steps": 1}
    assert found["needed"] == []
    assert "mesh.tp = 2" in found["left_out"]
    assert 'name = "nano"' in found["files"]["run.toml"]


def test_a_plan_that_is_proven_is_not_bisected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "nano", "--bisect"]) == 0
    assert capsys.readouterr().out.endswith("\nproven\n")


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
    sets = ("activation=gelu", "experts.num_experts=4", "experts.top_k=2", "experts.ffn=64")
    flags = [word for one in sets for word in ("--set", f"model.{one}")]
    assert main(["prove", "nano", *flags]) == 2
    assert capsys.readouterr().err.startswith("error[not-built-yet]")


@pytest.mark.slow
def test_a_claim_that_one_precision_has_no_use_for_has_no_entry_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mixed = ["--set", "precision.parameters=bf16", "--set", "precision.gradients=bf16"]
    assert main(["prove", "nano", *mixed]) == 0
    rows = capsys.readouterr().out.splitlines()
    (masters,) = [row for row in rows if row.startswith("parameters are the rounding")]
    assert masters.split()[-2:] == ["-", "equal"]
    (held,) = [row for row in rows if row.startswith("bytes held")]
    assert held.split()[-2:] == ["equal", "equal"]


def test_a_program_is_proven_by_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--subject", "examples/verify_ddp.py", "--ranks", "2"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("examples/verify_ddp.py: dp2 beside one device, 3 steps, seed 0;")
    assert "every gradient that the optimizer takes " in output.out
    assert output.out.endswith("\nproven\n")


def test_a_wrong_program_exits_1_and_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changes = {"DTYPE = torch.float32": "DTYPE = torch.float64", "* dp / tokens": "/ tokens"}
    file = str(written(tmp_path, "ddp", changes))
    assert main(["prove", "--subject", file, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["proof"]["passes"][0]["diagnosis"]
    assert (told["rule"], told["factor"], told["axis"]) == ("prove-loss", "1/dp", "dp")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nano", "--subject", "examples/verify_ddp.py"],
        ["nano", "--ranks", "2"],
        ["--subject", "examples/verify_ddp.py", "--set", "mesh.tp=2"],
    ],
)
def test_what_does_not_go_together_is_told(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *words]) == 2
    assert "error[bad-argument]" in capsys.readouterr().err
