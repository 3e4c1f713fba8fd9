"""`echelon explain context` compares the kinds with the numbers of a run, and takes one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from echelon.cli.explain_context_fits import KINDS
from echelon.cli.explain_context_ways import WAYS
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.cost.context_memory import most_attention_memory
from echelon.cost.context_times import block_bytes
from echelon.cost.context_work import imbalance

LONG = (
    "llama3-8b", "--set", "mesh.cp=8", "--set", "cluster.preset=8xh100",
    "--set", "batch.sequence_length=131072", "--set", "model.max_positions=131072",
    "--set", "precision.parameters=bf16", "--set", "precision.gradients=bf16",
)  # fmt: skip


def page(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what the command prints."""
    assert main(["explain", "context", *flags]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def values(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    return json.loads(page(capsys, *flags, "--json"))["context"]


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_without_a_run_every_kind_is_told_with_its_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys)
    assert set(WAYS) == set(KINDS)
    for kind, way in WAYS.items():
        assert f"{kind}: {way.when}\n  splits   {way.splits}\n" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "80 blocks, 64 heads of 128            4.29 GB = 4 GiB  343.60 GB = 320 GiB" in text
    assert re.search(
        r"^8    40 GiB  0.5 GiB of each of 80     40 GiB  4 GiB of each of 10", text, re.M
    )
    assert "1912.6 MB" in text
    facts = values(capsys)["facts"]
    missing = {
        mask: facts["pairs"][mask] - facts["pairs_without_a_ring"][mask] for mask in facts["pairs"]
    }
    assert (facts["pairs"], missing) == ({"full": 16, "causal": 10}, {"full": 12, "causal": 6})
    assert facts["resident_chunks"] == {"waiting": 2, "overlapped": 3}
    assert facts["errors"]["merged"] < 1e-14 < facts["errors"]["own_keys"]


def test_a_run_gets_the_numbers_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, *LONG)
    assert (found["cp"], found["asked"], found["refused"]) == (8, "ring", [])
    assert [one["kind"] for one in found["kinds"]] == list(KINDS)
    for one in found["kinds"]:
        settings = [*LONG[2::2], f"context.kind={one['kind']}"]
        plan = load_job(LONG[0], settings).plan
        sent = [block_bytes(plan, rank) for rank in range(8)]
        stated = one["sent_forward_bytes"] + one["sent_backward_bytes"]
        assert stated == max(each.forward + each.backward for each in sent)
        assert one["peak_bytes"] == most_attention_memory(plan).peak.bytes
        assert one["imbalance"] == imbalance(plan)
        assert one["exposed_s"] <= one["transfer_s"]
    by_kind = {one["kind"]: one for one in found["kinds"]}
    # At 128k each step of the ring works much longer than its keys travel.
    assert by_kind["ring"]["exposed_s"] == 0.0
    assert by_kind["ulysses"]["exposed_s"] == by_kind["ulysses"]["transfer_s"] > 0
    assert by_kind["gathered"]["resident_chunks"] == 8
    assert found["taken"] == "ring"
    assert found["kv_bytes"]["model_with_all_heads"] == 4 * found["kv_bytes"]["model"]


def test_the_page_says_which_to_take_and_draws_who_meets_whom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys, *LONG)
    assert "Which to take\n\n  ring: " in text
    assert "of which it waits 0 ms for " in text
    grid = re.findall(r"^ +(\d+) on (\d) +((?:[\d.]+ *)+)$", text, re.MULTILINE)
    assert len(grid) == 16
    for chunk, place, row in grid:
        steps = row.split()
        assert int(place) == min(int(chunk), 15 - int(chunk))
        owners = [min(k, 15 - k) for k in range(int(chunk) + 1)]
        assert steps[: int(chunk) + 1] == [str((owner - int(place)) % 8) for owner in owners]
        assert set(steps[int(chunk) + 1 :]) <= {"."}
    assert "136 of 256 pairs of chunks meet, each once" in text
    assert max(map(len, text.splitlines())) <= 130


def test_a_kind_that_does_not_fit_is_named_with_its_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("nano", *sets("mesh.cp=8", "batch.sequence_length=120", "cluster.preset=8xcpu"))
    text = page(capsys, *flags, *sets("context.kind=striped"))
    assert "[ulysses-divides-heads]" in text
    assert "[context-divides-sequence]" in text
    found = values(capsys, *flags, *sets("context.kind=striped"))
    assert "ulysses" in {one["kind"] for one in found["refused"]}
    assert found["taken"] in {one["kind"] for one in found["kinds"]}


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        (["context", "nano"], ["bad-argument"]),
        (["context", "--set", "mesh.cp=2"], ["bad-argument"]),
        (["context", "nano", "--set", "mesh.cp=3"], ["context-divides-sequence"]),
        (["context", "--pp", "4"], ["bad-argument"]),
        (["zero", "nano", "--degree", "4"], ["bad-argument"]),
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
