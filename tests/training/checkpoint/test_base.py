"""What never changes is written once beside checkpoints, and found wherever it is asked for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.core.errors import CheckpointError
from echelon.training.checkpoint.communicator import ObjectCommunicator
from echelon.training.checkpoint.folder import clean_leftovers, find_checkpoint, list_checkpoints
from echelon.training.checkpoint.index import BaseReference, base_of, read_index
from echelon.training.checkpoint.load import check_checkpoint, load_checkpoint
from echelon.training.checkpoint.save import Snapshot, save_checkpoint
from tests.training.checkpoint.ranks import (
    IDENTITY,
    Cut,
    Tensors,
    by_columns,
    by_rows,
    cut_shards,
    empty_like,
    make_tensors,
    on_ranks,
)

TRAINED = "attention"


def parts(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return what is trained, with its moments, and what is frozen."""
    trained = {
        kind: {name: one for name, one in table.items() if TRAINED in name}
        for kind, table in tensors.items()
    }
    held = tensors["parameters"]
    return trained, {"parameters": {name: held[name] for name in held if TRAINED not in name}}


def save(
    directory: Path,
    step: int,
    tensors: Tensors,
    known: BaseReference | None = None,
    cut: Cut = by_rows,
    keep: int = 2,
) -> Path:
    trained, frozen = parts(tensors)

    def action(exchange: ObjectCommunicator) -> Path:
        snapshot = Snapshot(
            step=step,
            state={},
            shards=cut_shards(trained, cut, exchange.index, 2),
            base=cut_shards(frozen, cut, exchange.index, 2),
            known_base=known,
        )
        return save_checkpoint(directory, snapshot, identity=IDENTITY, exchange=exchange, keep=keep)

    return on_ranks(2, action)[0]


def test_the_base_is_written_once_and_read_by_any_layout(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    first = save(tmp_path / "run", 1, tensors)
    written = {one: one.stat().st_mtime_ns for one in (tmp_path / "run/base").iterdir()}
    for kind in tensors.values():
        for name, one in kind.items():
            one.mul_(2.0 if TRAINED in name else 1.0)
    for step in (2, 3):
        last = save(tmp_path / "run", step, tensors, known=base_of(first))
    assert {one: one.stat().st_mtime_ns for one in (tmp_path / "run/base").iterdir()} == written
    assert [one.step for one in list_checkpoints(tmp_path / "run")] == [2, 3]
    names = {
        name
        for table in json.loads((last / "index.json").read_text())["tensors"].values()
        for name in table
    }
    assert all(TRAINED in name for name in names)
    check_checkpoint(last)
    trained, frozen = parts(tensors)
    whole = {"parameters": {**trained["parameters"], **frozen["parameters"]}}

    def load(exchange: ObjectCommunicator) -> None:
        held = cut_shards(whole, by_columns, exchange.index, 4)
        found = empty_like(held)
        load_checkpoint(last, wanted=found, identity=IDENTITY, exchange=exchange)
        for name, pieces in held["parameters"].items():
            for one, other in zip(pieces, found["parameters"][name], strict=True):
                assert torch.equal(one.tensor, other.tensor), name

    on_ranks(4, load)


def test_a_checkpoint_goes_with_its_base_and_says_what_is_missing_without(tmp_path: Path) -> None:
    step = save(tmp_path / "run", 1, make_tensors(1))
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "run", moved)
    check_checkpoint(moved / step.name)
    shutil.copytree(moved / step.name, tmp_path / "alone" / step.name)
    with pytest.raises(CheckpointError, match="which is not there") as caught:
        read_index(tmp_path / "alone" / step.name)
    assert caught.value.rules == ("checkpoint-base",)
    # A link finds the base beside it.
    (tmp_path / "alone" / "linked").symlink_to(moved / step.name)
    shutil.copytree(moved / "base", tmp_path / "alone" / "base")
    check_checkpoint(tmp_path / "alone" / "linked")
    with pytest.raises(CheckpointError, match="frozen weights below checkpoints"):
        find_checkpoint(moved / "base")


def test_another_base_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    step = save(tmp_path / "run", 1, make_tensors(1))
    other = save(tmp_path / "other", 1, make_tensors(2))
    shutil.copytree(step, other.parent / "step-000009")
    with pytest.raises(CheckpointError, match="the base of another run") as caught:
        check_checkpoint(other.parent / "step-000009")
    assert caught.value.rules == ("checkpoint-base",)
    file = tmp_path / "run/base/rank-0001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        check_checkpoint(step)
    assert caught.value.rules == ("checkpoint-undamaged",)
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing") as caught:
        check_checkpoint(step)
    assert caught.value.rules == ("checkpoint-complete",)


def test_a_base_that_no_checkpoint_names_is_written_anew_and_one_in_use_is_not(
    tmp_path: Path,
) -> None:
    """A run that ends between its base and its first checkpoint leaves a base of nobody."""
    step = save(tmp_path / "run", 1, make_tensors(1))
    shutil.rmtree(step)
    again = save(tmp_path / "run", 1, make_tensors(2))
    assert base_of(again) is not None
    check_checkpoint(again)
    with pytest.raises(CheckpointError, match="other frozen weights") as caught:
        save(tmp_path / "run", 2, make_tensors(3))
    assert caught.value.rules == ("checkpoint-written-once",)
    (tmp_path / "run/.tmp-base-0123456789ab").mkdir()
    assert [one.name for one in clean_leftovers(tmp_path / "run")] == [".tmp-base-0123456789ab"]


def test_a_base_outside_of_the_run_is_refused(tmp_path: Path) -> None:
    step = save(tmp_path / "run", 1, make_tensors(1))
    # What an index names is looked up beside the checkpoint, by a plain name.
    shutil.copytree(tmp_path / "run/base", tmp_path / "base")
    found = base_of(step)
    assert found is not None
    index = replace(read_index(step), base=replace(found, folder="../base"), files={}, tensors={})
    (step / "index.json").write_text(index.to_text())
    with pytest.raises(CheckpointError) as caught:
        read_index(step)
    assert caught.value.rules == ("checkpoint-files-inside",)
