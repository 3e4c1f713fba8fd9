"""`echelon explain experts`: the numbers of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from echelon.cli.main import main

SPARSE = ("nano", "model.experts.num_experts=8", "model.experts.top_k=2", "model.experts.ffn=64")
TWO = (*SPARSE, "mesh.dp_shard=2", "mesh.ep=2")
PUBLISHED = (
    "deepseek-v3",
    "mesh.ep=64",
    "mesh.dp_shard=64",
    "zero.stage=1",
    "cluster.preset=64xh100",
    "batch.global_sequences=64",
    "batch.microbatch_sequences=1",
    "precision.parameters=bf16",
    "precision.gradients=bf16",
)


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints, of a run and its settings."""
    settings = [word for setting in words[1:] for word in ("--set", setting)]
    assert main(["explain", "experts", *words[:1], *settings]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def values(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    settings = [word for setting in words[1:] for word in ("--set", setting)]
    assert main(["explain", "experts", *words[:1], *settings, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["experts"]


def test_a_run_gets_its_rows_and_the_bytes_of_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, *TWO, "experts.capacity_factor=1.25")
    rows = found["rows"]
    assert rows["m dispatched by this rank"] == 256
    assert rows["S = (n-1)/n m k that leave it"] == 256
    assert rows["room of an expert in a sequence"] == 40
    flat, padded = found["dispatch_of_run"]
    assert (flat["name"], flat["asked"], padded["name"], padded["asked"]) == (
        "flat",
        True,
        "padded",
        False,
    )
    # 256 rows of 128 numbers and a gate there, without a gate back, and one count for each expert
    # of the other rank; backward the gates go the other way.
    row, gate = 4 * 128, 4
    assert flat["sent_forward_bytes"] == 256 * (2 * row + gate) + 4 * 8
    assert flat["sent_backward_bytes"] == 256 * (2 * row + gate)
    assert padded["sent_forward_bytes"] == 4 * 2 * 40 * (2 * row + gate)
    assert found["taken"] == "flat"
    assert [one["name"] for one in found["refused"]] == ["two-hop"]


def test_several_nodes_are_reached_in_two_hops_where_less_of_that_is_exposed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = values(capsys, *PUBLISHED)
    rows = found["rows"]
    assert rows["nodes of a token, at most"] == 4
    assert rows["of them to other nodes, flat"] == 4096 * 8 * 7 // 8
    # A token reaches 4 nodes at most, its own as likely as any.
    assert rows["to other nodes in two hops"] <= 4096 * 4 * 7 / 8
    flat, hops = found["dispatch_of_run"]
    assert flat["exposed_s"] > hops["exposed_s"]
    assert found["taken"] == "two-hop"
    text = page(capsys, *PUBLISHED)
    assert "Which to take\n\n  two-hop: " in text
    assert "padded cannot be here: without experts.capacity_factor" in text


def test_a_run_on_one_rank_has_no_rows_that_travel(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No row is sent: mesh.ep = 1" in page(capsys, *SPARSE)
    found = values(capsys, *SPARSE)
    assert (found["dispatch_of_run"], found["taken"]) == ([], None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experts", "nano"], "nano has no experts"),
        (["experts", "--set", "mesh.ep=2"], "where a run is named"),
        (["no-effect", "nano"], "RUN has an effect on `echelon explain context`, `experts`"),
        (
            ["experts", "--dp", "4"],
            "--dp has an effect on `echelon explain zero`, `memory` only",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["explain", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error[bad-argument]")
    assert message in error
