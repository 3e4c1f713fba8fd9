"""What there is to choose of experts, with its sources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from echelon.cli.explain.experts import expert_settings
from echelon.cli.main import main


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


def test_without_a_run_every_choice_is_told_with_its_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys)
    words = " ".join(text.split())
    for title, choices in expert_settings().items():
        assert title in text
        for one in choices:
            assert f"  {one['setting']}\n" in text
            assert f"{one['means']}. Source: {one['source']}" in words
    assert max(map(len, text.splitlines())) <= 120
    assert not any(line.endswith(" ") for line in text.splitlines())
    facts = values(capsys)["facts"]
    assert facts["elements"] == 2 * 4096 * 8 * 7168 == 469762048
    assert facts["sent_forward_bytes"] == 822083584
    assert facts["most_nodes"] == 4
    assert facts["room"] == 160
