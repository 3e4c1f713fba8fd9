"""What `echelon plan` says of parameter servers."""

from __future__ import annotations

import json

import pytest

from echelon.cli.main import main

SERVED = ["plan", "nano", "--set", "mesh.dp_replicate=2", "--set", "servers.count=2"]


def test_each_server_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """S06: what it holds, and what goes through it."""
    assert main(SERVED) == 0
    text = capsys.readouterr().out
    assert "4 = dp_replicate 2 + 2 servers" in text
    assert "through it" in text
    assert "gradients to servers" in text


def test_bytes_through_a_server_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """S06: 2 W model / S; and the bound of asynchronous ones is told."""
    assert main([*SERVED, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["servers"]
    through = [one["model_bytes_through_it_per_step"] for one in (first, second)]
    assert sum(through) == 2 * 2 * 4 * 771_328
    assert main([*SERVED, "--set", "servers.updates=asynchronous"]) == 0
    assert "at most 2 steps ahead of the slowest" in capsys.readouterr().out
