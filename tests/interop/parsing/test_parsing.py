"""What a foreign file is, before its keys are read: its kind, its syntax, its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.parsing import parse_json, parse_yaml


@pytest.mark.parametrize(
    "text", ["{", "[1]", "3", '{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 1}}', "[" * 100_000]
)
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_json(Path("file"), text)
    assert caught.value.rules == ("import-syntax",)


@pytest.mark.parametrize(
    "text",
    ["a: [", "- 1", "text", "a: 1\na: 2", "a: !!python/object:os.system {}", "a: {b: 1, b: 2}"],
)
def test_what_is_no_yaml_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(Path("file"), text)
    assert caught.value.rules == ("import-syntax",)
