"""The generated pages of docs/reference are current, and whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.cli.app import COMMANDS
from echelon.config.settings.schema import SETTINGS
from echelon.core.rulebook import all_rules
from tests.docs.doc_pages import PAGES, REFERENCE, units_and_examples


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_the_page_is_what_is_generated(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == PAGES[file](), "python -m tests.docs.doc_pages"


def test_every_rule_and_command_has_a_heading() -> None:
    rules = re.findall(r"^### (.*)$", (REFERENCE / "rules.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rules) == sorted(rule.id for rule in all_rules())
    text = (REFERENCE / "commands.md").read_text("utf-8")
    assert re.findall(r"^## echelon (.*)$", text, re.MULTILINE) == list(COMMANDS)


def test_every_setting_has_a_unit_and_an_example_that_it_takes() -> None:
    known = units_and_examples()
    assert list(known) == list(SETTINGS)
    assert {key for key, (unit, _) in known.items() if not unit} == set()
    wrong = {key for key, (_, value) in known.items() if SETTINGS[key].kind.check(value)}
    assert wrong == set()


def test_units_say_what_the_names_say() -> None:
    units = {key: unit for key, (unit, _) in units_and_examples().items()}
    assert {units[key] for key in SETTINGS if key.endswith("_bytes")} == {"bytes"}
    assert {units[key] for key in SETTINGS if key.endswith("_s")} == {"seconds"}
