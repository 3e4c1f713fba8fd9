"""`echelon explain context` compares the kinds with the numbers of a run, and takes one."""

from __future__ import annotations

import json
import re

import pytest

from echelon.cli.main import main

pytestmark = pytest.mark.usefixtures("wide")

LONG = (
    "llama3-8b", "--set", "mesh.cp=8", "--set", "cluster.preset=8xh100",
    "--set", "batch.sequence_length=131072", "--set", "model.max_positions=131072",
    "--set", "precision.parameters=bf16", "--set", "precision.gradients=bf16",
)  # fmt: skip


FEW_HEADS = (*(word.replace("=8xh100", "=64xh100") for word in LONG), "--set", "mesh.tp=8")
"""Four heads on a tensor rank, so that eight ranks cannot exchange them."""


def page(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what the command prints."""
    assert main(["explain", "context", *flags]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_the_page_says_which_to_take_and_draws_who_meets_whom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys, *FEW_HEADS)
    assert "Which to take\n\n  ring: " in text
    assert re.search(r"with [\d.]+ ms exposed of [\d.]+ ms of transfers", text)
    grid = re.findall(r"^ +(\d+) on (\d) +((?:[\d.]+ *)+)$", text, re.MULTILINE)
    assert len(grid) == 16
    for chunk, place, row in grid:
        steps = row.split()
        assert int(place) == min(int(chunk), 15 - int(chunk))
        owners = [min(k, 15 - k) for k in range(int(chunk) + 1)]
        assert steps[: int(chunk) + 1] == [str((owner - int(place)) % 8) for owner in owners]
        assert set(steps[int(chunk) + 1 :]) <= {"."}
    assert "136 of 256 pairs of chunks meet, each once" in text
    assert max(map(len, text.splitlines())) <= 160


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        (["context", "nano"], ["bad-argument"]),
        (["context", "--set", "mesh.cp=2"], ["bad-argument"]),
        (
            ["context", "nano", *sets("mesh.cp=3", "batch.sequence_length=128")],
            ["context-divides-sequence"],
        ),
        (["context", "--pp", "4"], ["bad-argument"]),
        (["zero", "nano", "--dp", "4"], ["bad-argument"]),
        (["contex"], ["unknown-rule"]),
    ],
)
def test_what_has_no_answer_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], rules: list[str]
) -> None:
    assert main(["explain", *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert set(rules) <= set(re.findall(r"^error\[([a-z-]+)\]", output.err, re.MULTILINE))


def test_a_plan_shows_how_its_context_ranks_meet(capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        "plan",
        "nano",
        *sets("mesh.cp=4", "context.kind=ulysses-ring", "batch.sequence_length=64"),
    ]
    assert main(run) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert (
        "context ulysses-ring over cp 4 = ulysses 2 x ring 2, 16 positions on each rank, "
        "attention uneven by 0.00 %"
    ) in page
    assert main([*run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["context"]
    assert (found["ulysses_degree"], found["ring_degree"], found["positions_per_rank"]) == (
        2,
        2,
        16,
    )
    assert sum(found["scores_by_rank"]) == 2 * 64 * 65 // 2 * 4
    assert main(["plan", "nano"]) == 0
    assert "\ncontext " not in capsys.readouterr().out


def test_documents_and_caps_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "batch.documents=separate", "--set", "model.soft_cap=30"]
    assert main(["explain", "context", "nano", "--set", "mesh.cp=4", *settings]) == 0
    said = capsys.readouterr().out
    assert "causal, soft cap 30, documents apart" in said
    assert "Sequences of several documents are less work" in said
