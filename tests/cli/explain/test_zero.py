"""`echelon explain zero` derives what ranks hold, and gives no figure without N."""

from __future__ import annotations

import json
import re

import pytest

from echelon.cli.main import main
from echelon.cost.bytes.model_sizes import FP32_PRECISION, communication_volume, model_states

pytestmark = pytest.mark.usefixtures("wide")


def page(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what the command prints."""
    assert main(["explain", "zero", *flags]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_seven_billion_on_four_ranks_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--parameters", "7e9", "--dp", "4")
    for line in (
        "parameters        2 x 7,000,000,000 = 13.04 GiB",
        "optimizer state  12 x 7,000,000,000 = 78.23 GiB",
        "together         16 x 7,000,000,000 = 104.31 GiB",
        "112,000,000,000 bytes / 2^30 = 104.31 GiB",
        "12/16 = 75 % of it",
        "4 x 7.00B = 28.00B parameters, 21.00B of them again; at stage 3 each stores 1.75B",
    ):
        assert line in text
    held = re.findall(r"psi(?:/N)? +([\d.]+) GiB +([\d.]+) GiB +([\d.]+) GiB +([\d.]+) GiB", text)
    assert held == [
        ("13.04", "13.04", "78.23", "104.31"),
        ("13.04", "13.04", "19.56", "45.63"),
        ("13.04", "3.26", "19.56", "35.86"),
        ("3.26", "3.26", "19.56", "26.08"),
    ]
    assert re.findall(r"(\d) psi s \(N-1\)/N +([\d.]+) GB", text) == [
        ("2", "21.00"),
        ("2", "21.00"),
        ("2", "21.00"),
        ("3", "31.50"),
    ]
    assert max(map(len, text.splitlines())) <= 160


def test_without_parameters_the_page_is_in_psi(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "--dp", "64")
    assert "4.188 psi" in text
    assert "GB" not in text
    assert "GiB" not in text
    assert "Without ZeRO" not in text


def test_memory_asks_for_the_largest_model_and_the_cheapest_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys, "--dp", "4", "--memory-bytes", "80e9", "--parameters", "7e9")
    assert "5.00B at stage 0, 11.43B at stage 1, 14.55B at stage 2, 20.00B at stage 3" in text
    assert "The cheapest stage whose states fit: 1\n" in text
    same = [
        page(capsys, "--dp", "4", "--memory-bytes", size, "--parameters", "7e9")
        for size in ("80 GB", "80GB", "80_000_000_000", "80000 MB")
    ]
    assert set(same) == {text}
    text = page(capsys, "--dp", "4", "--memory-bytes", "8e9", "--parameters", "7e9")
    assert "The states fit at no stage" in text


def test_json_holds_what_the_formulas_give(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--parameters", "1e9", "--dp", "8", "--precision", "fp32", "--json")
    found = json.loads(page(capsys, *flags, "--memory-bytes", "1e10"))["zero"]
    assert (found["degree"], found["num_parameters"], found["precision"]) == (8, 10**9, "fp32")
    for row in found["stages"]:
        states = model_states(1e9, row["stage"], 8, FP32_PRECISION)
        assert row["held_bytes"] == states.total
        assert row["optimizer_bytes"] == states.optimizer
        assert row["sent_bytes_per_step"] == communication_volume(row["stage"]).sent_bytes(
            1e9, 8, 4
        )
    assert found["cheapest_stage"] == 1
    assert found["largest_models"] == [625_000_000, 1_111_111_111, 1_818_181_818, 5_000_000_000]


@pytest.mark.parametrize("count", ["7B", "7b", "7e9", "7_000_000_000", "7000 M"])
def test_parameters_are_typed_as_people_write_them(
    capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert "psi = 7,000,000,000 parameters" in page(capsys, "--dp", "4", "--parameters", count)


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        (["zero", "--parameters", "7e9"], ["zero-needs-degree"]),
        (["zero"], ["zero-needs-degree"]),
        (["zero", "--dp", "0"], ["prediction-in-range"]),
        (["zero", "--dp", "4", "--parameters", "1.5"], ["unreadable-quantity"]),
        (
            ["zero", "--parameters", "inf", "--memory-bytes", "-1"],
            ["zero-needs-degree", "unreadable-quantity", "unreadable-quantity"],
        ),
        (["tp-divides-heads", "--dp", "4"], ["bad-argument"]),
        (["--parameters", "7e9"], ["bad-argument"]),
        (["zeros"], ["unknown-rule"]),
    ],
)
def test_what_has_no_answer_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], rules: list[str]
) -> None:
    assert main(["explain", *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.findall(r"^error\[([a-z-]+)\]", output.err, re.MULTILINE) == rules


def test_a_misspelt_page_is_told_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "zeros"]) == 2
    assert "works here: zero" in capsys.readouterr().err
