"""Rates in all their units: bits and bytes, one way and both ways."""

from __future__ import annotations

import json
import re

import pytest

from echelon.cli.main import main

BF16 = ("--set", "precision.parameters=bf16", "--set", "precision.gradients=bf16")


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints."""
    assert main(["explain", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "--json" in words or max(map(len, output.out.splitlines())) <= 80
    return output.out


@pytest.mark.system("S45")
def test_units_keep_bits_and_directions_apart(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("units", "llama3-70b", "--set", "cluster.preset=16xa100-80gb", *BF16[:2])
    text = page(capsys, *run)
    assert re.search(r"NVLink 3.* 300 GB/s +2,400 Gb/s +600 GB/s", text)
    assert re.search(r"InfiniBand HDR.* 25 GB/s +200 Gb/s +50 GB/s", text)
    assert "bf16    312.0 TFLOP/s, together 4.99 PFLOP/s" in text
    found = json.loads(page(capsys, *run, "--json"))["units"]
    for row in found["utilizations"]:
        assert row["flops"] == pytest.approx(16 * 312e12 * row["mfu"])
        assert row["tokens_per_s"] * found["flops_per_token"] == pytest.approx(row["flops"])
