"""The page of echelon explain choose: trees, tables, and where guides differ."""

from __future__ import annotations

import re

import pytest

from echelon.cli.main import main
from echelon.handbook.guides.practices import PRACTICES

LARGE = ("--set", "cluster.preset=64xh100", "--set", "precision.parameters=bf16")


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints."""
    assert main(["explain", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_each_tree_shows_its_questions_numbers_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "choose", "llama3-70b", *LARGE)
    for line in (
        "distributed (distributed, decision tree): Fits one device, or which axis first",
        "  no   Does the model, with gradients and optimizer state, fit one device?",
        "       NVLink 4 + NVSwitch: 450 GB/s one way; 100 asked",
        "  -> pipeline over nodes, tensor inside: no ZeRO, tp 1 or more, pp 2 or more",
        "  distributed, llm-training: pp 2 or more against 1; ZeRO 0 against 3",
        "  The cheapest communication that fits: ZeRO 3, recomputed. llm-training",
        "  distributed: author unknown, Distributed Parallelism in Deep Learning,",
    ):
        assert line in text
    assert re.search(r"\n     dp 64, ZeRO 3: \d+\.\d of \d+\.\d GiB, does not fit\n", text)
    assert max(map(len, text.splitlines())) <= 120
    assert all(practice.id in text for practice in PRACTICES)


def test_guides_that_agree_are_told_and_a_run_is_compared_with_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys, "choose", "nano", "--set", "mesh.dp_shard=4", "--set", "zero.stage=2")
    assert "Beside this run (dp 4, ZeRO 2)" in text
    assert "  distributed: ZeRO 2, not 0" in text
    assert "  llm-training: ZeRO 2, not 3" in text
