"""What the README shows is what its commands print, and what it names exists."""

from __future__ import annotations

import re

import pytest

from echelon.cli.main import COMMANDS, FAMILIES
from tests.readme import BLOCK, FIGURES, README, drawn, printed, timeless

TEXT = README.read_text(encoding="utf-8")


@pytest.mark.parametrize("match", list(BLOCK.finditer(TEXT)), ids=lambda match: match[1])
def test_a_block_is_what_its_command_prints(
    match: re.Match[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(README.parent)
    assert timeless(match[2]) == timeless(printed(match[1]))


def test_there_are_blocks() -> None:
    assert len(BLOCK.findall(TEXT)) >= 2


@pytest.mark.parametrize("path", FIGURES)
def test_a_figure_is_what_its_command_draws(path: str) -> None:
    assert f"]({path})" in TEXT
    assert (README.parent / path).read_text(encoding="utf-8") == drawn(FIGURES[path])


def test_every_command_that_is_named_exists() -> None:
    families = "|".join(FAMILIES)
    named = set(re.findall(rf"echelon ((?:(?:{families}) )?[a-z]+)\b", TEXT))
    unknown = named - set(COMMANDS) - {"as"}
    assert unknown == set()


def test_every_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []
