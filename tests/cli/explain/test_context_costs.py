"""What each kind of context parallelism costs one run, and which is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from echelon.cli.explain.context import KINDS
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.cost.bytes.context_memory import most_attention_memory
from echelon.cost.bytes.context_sent import block_bytes
from echelon.layout.context_work import attention_imbalance

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


def test_a_run_gets_the_numbers_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, *LONG)
    assert (found["cp"], found["asked"], found["refused"]) == (8, "ring", [])
    assert [one["kind"] for one in found["kinds"]] == list(KINDS)
    for one in found["kinds"]:
        settings = [*LONG[2::2], f"context.kind={one['kind']}"]
        plan = load_job(LONG[0], settings).plan
        sent = [block_bytes(plan, rank) for rank in range(8)]
        stated = one["sent_forward_bytes"] + one["sent_backward_bytes"]
        assert stated == max(map(sum, sent))
        assert one["peak_bytes"] == most_attention_memory(plan).peak.bytes
        assert one["imbalance"] == attention_imbalance(plan)
        assert one["exposed_s"] <= one["transfer_s"]
    by_kind = {one["kind"]: one for one in found["kinds"]}
    # At 128k each step of the ring works much longer than its keys travel: what shows is only by
    # how much messages slow the work beside them.
    assert 0.0 < by_kind["ring"]["exposed_s"] < by_kind["ring"]["transfer_s"]
    assert by_kind["ulysses"]["exposed_s"] == by_kind["ulysses"]["transfer_s"] > 0
    assert by_kind["gathered"]["resident_chunks"] == 8
    # What Ulysses exposes is less than a hundredth of attention, and it holds less.
    assert found["taken"] == "ulysses"
    assert found["kv_bytes"]["model_with_all_heads"] == 4 * found["kv_bytes"]["model"]


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
