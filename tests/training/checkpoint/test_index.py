"""The index is read as it was written; another schema, damage, and files outside are refused."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.errors import CheckpointError
from echelon.training.checkpoint.index import (
    INDEX_FILE,
    STATE_FILE,
    CheckpointFileEntry,
    CheckpointIndex,
    Rectangle,
    ShardEntry,
    TensorEntry,
    covering_problem,
    read_index,
    read_state,
)

SHAPE = (4, 3)


def make(file: str = "rank-0000.safetensors", **changes: Any) -> CheckpointIndex:
    piece = ShardEntry(file=file, key="parameters/w@0,2", offset=(0, 2), shape=(3, 4))
    entries: dict[str, Any] = {
        "step": 7,
        "world_size": 2,
        "echelon_version": "1.2.3",
        "plan_hash": "plan",
        "model_hash": "model",
        "tokenizer_hash": "tokens",
        "mathematics": {"seed": 3},
        "files": {file: CheckpointFileEntry(size_bytes=48, sha256="ab")},
        "tensors": {
            "parameters": {"w": TensorEntry(dtype="F32", shape=(3, 6), pieces=(piece,))},
            "optimizer.exp_avg": {},
        },
    }
    return CheckpointIndex(**{**entries, **changes})


def write(folder: Path, data: dict[str, Any], *, signed: bool = True) -> None:
    """Write an index that was edited, with a checksum that is that of its content or is not."""
    if signed:
        data.pop("checksum", None)
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        data["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / INDEX_FILE).write_text(json.dumps(data))


def refused(folder: Path) -> tuple[tuple[str, ...], str]:
    with pytest.raises(CheckpointError) as caught:
        read_index(folder)
    return caught.value.rules, str(caught.value)


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    text = make().to_text()
    (tmp_path / INDEX_FILE).write_text(text)
    assert read_index(tmp_path) == make()
    # One tensor or file to a line, for those who look into it.
    assert sum("rank-0000.safetensors" in line for line in text.splitlines()) == 2
    assert text.splitlines()[-2].startswith(' "checksum": ')


def test_every_entry_counts_for_the_checksum(tmp_path: Path) -> None:
    data = json.loads(make().to_text())
    for key in data.keys() - {"schema", "checksum"}:
        write(tmp_path, {**data, key: None}, signed=False)
        rules, said = refused(tmp_path)
        assert rules == ("checkpoint-undamaged",)
        assert "does not have the checksum that it states" in said


@pytest.mark.parametrize(
    ("changes", "rule", "said"),
    [
        ({"schema": 3}, "checkpoint-schema", "schema 3, written by Echelon 1.2.3"),
        ({"schema": 0}, "checkpoint-undamaged", "schema 0"),
        ({"schema": None}, "checkpoint-undamaged", "schema None"),
        ({"step": "7"}, "checkpoint-undamaged", "step: expected"),
        ({"world_size": True}, "checkpoint-undamaged", "world_size: expected"),
        ({"tensors": {"parameters": []}}, "checkpoint-undamaged", "parameters: expected a table"),
        ({"files": {}}, "checkpoint-undamaged", "gives no checksum of: rank-0000"),
    ],
)
def test_an_index_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], rule: str, said: str
) -> None:
    write(tmp_path, {**json.loads(make().to_text()), **changes})
    rules, message = refused(tmp_path)
    assert rules == (rule,)
    assert said in message


def test_an_entry_that_is_not_known_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {**json.loads(make().to_text()), "note": "x"})
    assert read_index(tmp_path) == make()


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    data = json.loads(make().to_text())
    del data["plan_hash"]
    write(tmp_path, data)
    assert "plan_hash is missing" in refused(tmp_path)[1]


@pytest.mark.parametrize("name", ["../rank-0000.safetensors", "/etc/passwd", "a/b", ".."])
def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX_FILE).write_text(make(name).to_text())
    rules, said = refused(tmp_path)
    assert rules == ("checkpoint-files-inside",)
    assert name in said


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "checkpoint-exists"),
        ("[]", "checkpoint-undamaged"),
        ("{", "checkpoint-undamaged"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str | None, rule: str) -> None:
    for name, read in ((INDEX_FILE, read_index), (STATE_FILE, read_state)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path)
        assert caught.value.rules == (rule,)
        assert name in str(caught.value)


def test_the_state_is_any_object(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"step": 3, "any": [1]}')
    assert read_state(tmp_path) == {"step": 3, "any": [1]}


def _elements(piece: Rectangle) -> list[tuple[int, ...]]:
    spans = zip(piece.offset, piece.end, strict=True)
    return list(product(*(range(a, b) for a, b in spans)))


@st.composite
def _pieces(draw: st.DrawFn) -> Rectangle:
    spans = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in SHAPE]
    return Rectangle(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def _halves(piece: Rectangle, cuts: list[tuple[int, int]]) -> list[Rectangle]:
    pieces = [piece]
    for dim, at in cuts:
        split: list[Rectangle] = []
        for one in pieces:
            a, b = one.offset[dim], one.end[dim]
            if a < at < b:
                for lo, hi in ((a, at), (at, b)):
                    offset, shape = list(one.offset), list(one.shape)
                    offset[dim], shape[dim] = lo, hi - lo
                    split.append(Rectangle(tuple(offset), tuple(shape)))
            else:
                split.append(one)
        pieces = split
    return pieces


@given(st.lists(_pieces().filter(lambda piece: piece.numel > 0), max_size=6))
def test_a_fault_is_found_exactly_where_counting_finds_one(pieces: list[Rectangle]) -> None:
    counts = Counter(element for piece in pieces for element in _elements(piece))
    whole = all(counts[place] == 1 for place in product(*map(range, SHAPE)))
    assert (covering_problem(SHAPE, pieces) == "") == whole


@given(st.lists(st.sampled_from([(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)])), st.randoms())
def test_any_cut_of_the_whole_covers_it(cuts: list[tuple[int, int]], dice: object) -> None:
    pieces = _halves(Rectangle((0, 0), SHAPE), cuts)
    dice.shuffle(pieces)  # pyright: ignore[reportAttributeAccessIssue]
    assert covering_problem(SHAPE, pieces) == ""
    if len(pieces) > 1:
        assert "elements" in covering_problem(SHAPE, pieces[1:])


@given(_pieces(), _pieces())
def test_what_is_in_both(left: Rectangle, right: Rectangle) -> None:
    common = left.intersection(right)
    both = set(_elements(left)) & set(_elements(right))
    assert set(_elements(common) if common else []) == both
    if common:
        inner = common.slices_within(left)
        assert [s.stop - s.start for s in inner] == list(common.shape)


def test_pieces_outside_of_the_tensor_or_of_other_dims_are_faults() -> None:
    assert "is not inside" in covering_problem((4,), [Rectangle((1,), (4,))])
    assert "is not inside" in covering_problem((4,), [Rectangle((-1,), (4,))])
    assert "dims" in covering_problem((4,), [Rectangle((0, 0), (4, 1))])
    assert covering_problem((), [Rectangle((), ())]) == ""
    assert "overlap" in covering_problem((), [Rectangle((), ())] * 2)
