"""What is proposed instead of flags that do not work was tried out."""

from __future__ import annotations

import json

import pytest

from echelon.cli.main import main
from echelon.cli.schedule.arguments import MOST_DRAWN, MOST_SEARCHED


def problems(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    """Return what a command that ends with 2 says is wrong."""
    assert main([*words, "--json"]) == 2
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)["problems"]


def retyped(typed: str, works: str) -> list[str]:
    """Return a command with the flags that the error proposes instead of its own."""
    if works.startswith("echelon "):
        return works.split()[1:]
    words = typed.split()
    for flag, value in zip(works.split()[::2], works.split()[1::2], strict=True):
        short = {"--pp": "-p", "--microbatches": "-m"}.get(flag, flag)
        if short in words:
            words[words.index(short) + 1] = value
        else:
            words += [short, value]
    return ["schedule", "show", *words]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        ("1f1b -p 4 -m 3", "schedule-needs-microbatches"),
        ("1f1b -p 4 -m 0", "schedule-needs-microbatches"),
        ("1f1b -p -4 -m 8", "schedule-stages-per-rank"),
        ("1f1b -p 0 -m 0", "schedule-stages-per-rank"),
        ("interleaved-1f1b -p 4 -m 3", "schedule-needs-microbatches"),
        ("interleaved-1f1b -p 4 -m 8 --virtual-stages 1", "schedule-stages-per-rank"),
        ("zb-v -p 4 -m 8 --virtual-stages 3", "schedule-stages-per-rank"),
        ("dualpipe -p 3 -m 8", "schedule-even-ranks"),
        ("dualpipe -p 4 -m 9", "schedule-even-microbatches"),
        ("1f1b -p 100000 -m 100000", "prediction-in-range"),
        ("zb-v -p 1000000000000 -m -2", "prediction-in-range"),
        ("dualpipe -p 900 -m 7000", "prediction-in-range"),
        ("auto -p 100000 -m 100000 --slots 1,1,1,0", "prediction-in-range"),
        ("auto -p 2 -m -3", "prediction-in-range"),
        ("auto -p 2 -m 4 --virtual-stages 2 --most-in-flight 1", "schedule-search-has-memory"),
        ("gpipe -p 2 -m 4 --most-in-flight 3,4", "schedule-within-memory"),
        ("1f1b -p 2 -m 2 --slots 1e-310,0,0", "bad-argument"),
        ("1f1b -p 2 -m 2 --slots 1,1,inf", "bad-argument"),
    ],
)
def test_what_is_proposed_works_when_it_is_typed(
    typed: str, rule: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Smaller limits: what is proposed near them is run.
    monkeypatch.setattr("echelon.cli.schedule.arguments.MOST_DRAWN", 2**10)
    monkeypatch.setattr("echelon.cli.schedule.arguments.MOST_SEARCHED", 2**7)
    found = problems(capsys, "schedule", "show", *typed.split())
    assert found[0]["rule"] == rule
    assert found[0]["works"]
    for works in found[0]["works"]:
        assert main(retyped(typed, works)) == 0, works
        capsys.readouterr()


@pytest.mark.parametrize(("name", "most"), [("1f1b", MOST_DRAWN), ("auto", MOST_SEARCHED)])
def test_what_would_not_end_is_refused_at_once(
    name: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = ["-p", "64", "-m", str(most // 64 + 1)]
    (problem,) = problems(capsys, "schedule", "show", name, *numbers)
    assert problem["rule"] == "prediction-in-range"
    assert f"more than {most} are not gone through" in problem["message"]
    assert problem["works"][0] == f"--microbatches {most // 64}"
