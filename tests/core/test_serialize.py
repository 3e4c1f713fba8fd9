"""JSON round trips of frozen dataclasses, and everything that does not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.serialize import DEEPEST, content_hash, decode_json, from_json, to_json
from tests.walks import examples


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    count: int
    ratio: float = 0.5
    colour: Colour = Colour.RED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    name: str
    on: bool
    stage: Literal[0, 1, 2] = 0
    leaf: Leaf | None = None
    pair: tuple[int, str] = (1, "a")
    many: tuple[tuple[Leaf, ...], ...] = ()
    size: int | str = 3
    first: Leaf = field(default_factory=lambda: Leaf(count=1))


LEAVES = st.builds(
    Leaf,
    count=st.integers(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    colour=st.sampled_from(Colour),
)
TREES = st.builds(
    Tree,
    name=st.text(),
    on=st.booleans(),
    stage=st.sampled_from((0, 1, 2)),
    leaf=st.none() | LEAVES,
    pair=st.tuples(st.integers(), st.text()),
    many=st.lists(st.lists(LEAVES, max_size=2).map(tuple), max_size=2).map(tuple),
    size=st.integers() | st.text(),
    first=LEAVES,
)


@given(TREES)
@settings(deadline=None, max_examples=examples(60))
def test_what_was_written_is_read_again(tree: Tree) -> None:
    text = json.dumps(to_json(tree))
    again = from_json(Tree, json.loads(text))
    assert again == tree
    assert content_hash(again) == content_hash(tree)


@given(TREES, TREES)
@settings(deadline=None, max_examples=examples(40))
def test_the_hash_names_the_content(one: Tree, other: Tree) -> None:
    assert (content_hash(one) == content_hash(other)) == (to_json(one) == to_json(other))


def test_the_hash_does_not_depend_on_the_order_of_entries() -> None:
    assert content_hash({"a": 1, "b": (2, 3)}) == content_hash({"b": [2, 3], "a": 1})
    assert len(content_hash({})) == 16


def test_entries_with_a_default_may_be_left_out() -> None:
    assert from_json(Leaf, {"count": 2}) == Leaf(count=2)


def test_a_whole_number_is_a_float_where_one_is_wanted() -> None:
    ratio = from_json(Leaf, {"count": 2, "ratio": 1}).ratio
    assert ratio == 1.0
    assert type(ratio) is float


MINIMAL: dict[str, Any] = {"name": "t", "on": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, r"Tree: unknown entries \['colour'\]"),
        ({"name": None}, "Tree.name: expected <class 'str'>, found None"),
        ({"on": 1}, "Tree.on: expected <class 'bool'>, found 1"),
        ({"stage": 3}, r"Tree.stage: 3 is none of \(0, 1, 2\)"),
        ({"stage": True}, r"Tree.stage: True is none of \(0, 1, 2\)"),
        ({"stage": 1.0}, r"Tree.stage: 1.0 is none of \(0, 1, 2\)"),
        ({"stage": [1]}, r"Tree.stage: \[1\] is none of \(0, 1, 2\)"),
        ({"leaf": {}}, "Tree.leaf: count is missing"),
        ({"leaf": {"count": 1.0}}, "Tree.leaf.count: expected <class 'int'>, found 1.0"),
        ({"leaf": {"count": True}}, "Tree.leaf.count: expected <class 'int'>, found True"),
        ({"leaf": {"count": 1, "ratio": "x"}}, "Tree.leaf.ratio: expected <class 'float'>"),
        ({"leaf": {"count": 1, "ratio": False}}, "Tree.leaf.ratio: expected <class 'float'>"),
        ({"leaf": {"count": 1, "colour": "green"}}, "Tree.leaf.colour: 'green' is none of"),
        ({"leaf": {"count": 1, "colour": ["red"]}}, "Tree.leaf.colour: .* is none of"),
        ({"leaf": 3}, "Tree.leaf: expected a table, found 3"),
        ({"pair": [1]}, "Tree.pair: expected 2 items, found 1"),
        ({"pair": [1, 2]}, r"Tree.pair\[1\]: expected <class 'str'>, found 2"),
        ({"pair": "ab"}, "Tree.pair: expected a list, found 'ab'"),
        ({"many": [[{"count": 1}, {}]]}, r"Tree.many\[0\]\[1\]: count is missing"),
        ({"size": 1.5}, "Tree.size: expected <class 'int'>, found 1.5; Tree.size: expected"),
    ],
)
def test_what_does_not_fit_names_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(Tree, {**MINIMAL, **change})


def test_the_place_starts_with_what_the_caller_says() -> None:
    with pytest.raises(ValueError, match=r"^plan: name is missing$"):
        from_json(Tree, {}, where="plan")
    with pytest.raises(ValueError, match=r"^plan: expected a table, found 7$"):
        from_json(Tree, 7, where="plan")


@pytest.mark.parametrize("depth", [DEEPEST + 1, 900, 200_000])
@pytest.mark.parametrize("bracket", ["[", '{"a": '])
def test_brackets_without_end_are_no_json(depth: int, bracket: str) -> None:
    close = {"[": "]", '{"a": ': "}"}[bracket]
    for text in (bracket * depth, bracket * depth + "0" + close * depth):
        with pytest.raises(ValueError, match=r"nested more than|[Ee]xpecting"):
            decode_json(text)


def test_what_is_nested_as_files_are_is_read() -> None:
    depth = DEEPEST - 1
    assert decode_json("[" * depth + "]" * depth) == json.loads("[" * depth + "]" * depth)
    assert decode_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


def test_what_does_not_fit_is_shown_in_short() -> None:
    with pytest.raises(ValueError, match="expected a table") as caught:
        from_json(Leaf, ["x" * 10_000] * 1000)
    assert len(str(caught.value)) < 2_000
