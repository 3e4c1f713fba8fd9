"""Names in the spellings of people: one normalisation, and nothing that is ambiguous."""

from __future__ import annotations

import pytest

from echelon.config.presets import PRESET_KINDS, PresetKind, preset_names, spellings
from echelon.core.messages.names import contains_name, find_name, name_parts, names_within


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("Rtx_4090", "rtx4090"),
        ("4090", None),
        ("", None),
        ("--", None),
        ("Qwen3 1.7B", "qwen3-1.7b"),
        ("qwen3-17b", None),
        ("qwen3-1-7b", None),
    ],
)
def test_only_what_stands_between_the_parts_may_differ(typed: str, meant: str | None) -> None:
    known = {name: name for name in ("rtx4090", "qwen3-1.7b")}
    assert find_name(typed, known) == meant


def test_a_name_of_several_things_means_none_but_for_the_one_that_is_typed_exactly() -> None:
    known = {"a-1": "first", "a1": "second"}
    assert find_name("A1", known) is None
    assert find_name("a1", known) == "second"
    assert find_name("A 1", {"a-1": "first", "a1": "first"}) == "first"


def test_a_maker_is_part_of_a_name() -> None:
    assert name_parts("Qwen/Qwen3-8B") == ("qwen", "/", "qwen", "3", "8", "b")
    assert find_name("me/qwen3-8b", {"qwen3-8b": "it", "Qwen/Qwen3-8B": "it"}) is None


def test_a_name_that_is_not_said_to_its_end() -> None:
    known = ("a100-40gb", "a100-80gb", "a1000")
    assert names_within("A100", known) == ("a100-40gb", "a100-80gb")
    assert names_within("", known) == ()


def test_a_name_within_a_text() -> None:
    assert contains_name("NVIDIA H100 80GB HBM3", "h100")
    assert not contains_name("NVIDIA L40S", "l4")
    assert not contains_name("NVIDIA GH200 480GB", "h200")
    assert not contains_name("anything", "")


@pytest.mark.parametrize("kind", PRESET_KINDS)
def test_no_two_presets_have_one_name(kind: PresetKind) -> None:
    found = spellings(kind)
    assert set(preset_names(kind)) <= set(found)
    by_parts: dict[tuple[str, ...], set[str]] = {}
    for spelt, name in found.items():
        by_parts.setdefault(name_parts(spelt), set()).add(name)
    assert all(len(names) == 1 for names in by_parts.values())
