"""The generated pages of docs/reference are current, and whole."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from echelon.cli.app import COMMANDS
from echelon.config.cluster.settings import read_typed_cluster
from echelon.config.entries import flatten
from echelon.config.schema import SETTINGS
from echelon.core.rulebook import all_rules
from echelon.core.settings.value_types import Quantity
from tests.docs.doc_pages import (
    EXAMPLE_CLUSTER,
    PAGES,
    REFERENCE,
    cluster_fields,
    cluster_settings,
    units_and_examples,
)


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


def test_the_example_of_a_cluster_file_has_every_field_and_is_a_cluster() -> None:
    known, settings = cluster_fields(), cluster_settings()
    assert list(known) == list(settings)
    assert {key for key, (unit, about) in known.items() if not (unit and about)} == set()
    written = tomllib.loads(EXAMPLE_CLUSTER.read_text(encoding="utf-8"))
    links = written.pop("links")
    fields = {key for key, _ in flatten(written, settings=settings)}
    fields |= {f"links.{key}" for tier in links for key in tier}
    assert fields == set(settings)
    cluster = read_typed_cluster(str(EXAMPLE_CLUSTER), "--cluster")
    assert (cluster.num_devices, cluster.device.memory_bytes) == (32, round(23.64 * 2**30))
    inside, beyond = cluster.links
    assert (inside.degree, inside.efficiency, inside.bandwidth) == (8, 0.5, 31.508e9)
    assert (beyond.name, beyond.bandwidth, beyond.interfaces) == ("our network", 12.5e9, 1)
    assert dict(cluster.trainer)["step_s"] == 0.01


def test_units_of_a_cluster_file_say_what_the_kinds_say() -> None:
    units = {key: unit for key, (unit, _) in cluster_fields().items()}
    for key, setting in cluster_settings().items():
        if isinstance(setting.kind, Quantity):
            assert units[key] == setting.kind.dimension, key


def test_units_say_what_the_names_say() -> None:
    units = {key: unit for key, (unit, _) in units_and_examples().items()}
    assert {units[key] for key in SETTINGS if key.endswith("_bytes")} == {"bytes"}
    assert {units[key] for key in SETTINGS if key.endswith("_s")} == {"seconds"}
