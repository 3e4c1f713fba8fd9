"""`echelon explain errata` tells every claim, and `echelon explain ID` one of them."""

from __future__ import annotations

import json

import pytest

from echelon.cli.main import main
from echelon.handbook.errata.claims import all_claims


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints."""
    assert main(["explain", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "--json" in words or max(map(len, output.out.splitlines())) <= 120
    return output.out


def test_every_claim_is_told_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "errata")
    for claim in all_claims():
        assert f"{claim.id:<16} {claim.verdict} " in text
    assert "157: 51 ok, 48 wrong, 58 ambiguous" in text
    assert "said 5,400,000,000,000; holds 5,368,709,120 (=)" in text


@pytest.mark.parametrize(
    ("word", "count"),
    [("wrong", 48), ("bubble", 10), ("scaling", 21), ("between", 4), ("distributed-07", 1)],
)
def test_a_word_selects(capsys: pytest.CaptureFixture[str], word: str, count: int) -> None:
    found = json.loads(page(capsys, "errata", word, "--json"))["errata"]
    assert len(found["claims"]) == count == sum(found["counts"].values())


def test_one_claim_has_a_page_and_says_what_is_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys, "distributed-07")
    assert text == page(capsys, "errata", "distributed-07")
    for line in (
        "distributed-07: wrong",
        "  said      100, 400",
        "  holds     12.5, 25, 50",
        "  inputs    Gbps (100, 200, 400)",
        "  computed  12.5, 25, 50",
    ):
        assert line in text.splitlines()
    assert "\n  distributed: author unknown, Distributed Parallelism in Deep Learning, " in text
    found = json.loads(page(capsys, "distributed-07", "--json"))["claim"]
    assert found["computed"] == found["holds"] == [12.5, 25.0, 50.0]
    assert found["reproduced"] is True


@pytest.mark.parametrize("claim", [claim.id for claim in all_claims()])
def test_every_claim_has_a_page(capsys: pytest.CaptureFixture[str], claim: str) -> None:
    """The number of ranks of distributed-34 has no end: it is an infinity among the inputs."""
    assert page(capsys, claim).startswith(f"{claim}: ")
    assert "Infinity" not in page(capsys, claim, "--json")  # JSON has no such number


def test_an_unknown_word_is_told_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "errata", "wrongg"]) == 2
    assert "works here: wrong" in capsys.readouterr().err
    assert main(["explain", "distributed-99"]) == 2
    assert "distributed-" in capsys.readouterr().err
