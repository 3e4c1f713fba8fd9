"""Whatever is wrong with a checkpoint is an error that says what is there, never a fresh start."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.errors import CheckpointError
from echelon.core.plan import Precision
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.folder import (
    checkpoint_path,
    find_checkpoint,
    find_latest,
    new_temporary,
)
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import read_index, read_state
from echelon.training.checkpoint.load import check_checkpoint, load_checkpoint
from tests.training.checkpoint.ranks import (
    IDENTITY,
    SHAPE,
    by_rows,
    cut_shards,
    empty_like,
    load,
    make_tensors,
    save,
)

TENSORS = make_tensors()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2."""
    directory = tmp_path / "runs" / "nano" / "checkpoints"
    for step in (1, 2):
        save(directory, step=step, tensors=TENSORS)
    return directory


def _expect(action: Callable[[], object], *rules: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        action()
    assert caught.value.rules == rules
    return caught.value


def test_a_missing_run_lists_the_runs_that_are_there(checkpoints: Path) -> None:
    run = checkpoints.parent
    error = _expect(lambda: find_latest(run.with_name("nana")), "checkpoint-exists")
    assert "nana does not exist" in str(error)
    assert error.problems[0].suggestions == (str(run),)


def test_a_run_without_a_committed_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_temporary(checkpoint_path(run / "checkpoints", 7)).mkdir(parents=True)
    error = _expect(lambda: find_checkpoint(run), "checkpoint-exists")
    assert ".tmp-step-000007-" in str(error)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty is empty" in str(_expect(lambda: find_latest(empty), "checkpoint-exists"))


def test_a_missing_step_lists_the_other_steps(checkpoints: Path) -> None:
    error = _expect(lambda: find_checkpoint(checkpoints / "step-000003"), "checkpoint-exists")
    assert "step-000003 does not exist" in str(error)
    assert error.problems[0].suggestions == tuple(
        str(checkpoints / f"step-00000{n}") for n in (1, 2)
    )


def test_an_uncommitted_folder_is_refused_even_when_it_is_complete(checkpoints: Path) -> None:
    temporary = new_temporary(checkpoint_path(checkpoints, 2))
    (checkpoints / "step-000002").rename(temporary)
    error = _expect(lambda: find_checkpoint(temporary), "checkpoint-exists")
    assert "was never committed" in str(error)
    assert find_latest(checkpoints.parent).step == 1


def test_a_folder_that_is_no_checkpoint(checkpoints: Path) -> None:
    path = checkpoints / "step-000002"
    (path / "index.json").unlink()
    assert "has no index.json" in str(
        _expect(lambda: load(path, like=TENSORS), "checkpoint-exists")
    )


def test_a_missing_file_of_a_rank(checkpoints: Path) -> None:
    path = checkpoints / "step-000002"
    (path / "rank-0001.safetensors").unlink()
    error = _expect(lambda: load(path, like=TENSORS), "checkpoint-complete")
    assert "rank-0001.safetensors is missing" in str(error)
    assert "rank-0000.safetensors" in str(error)
    assert error.problems[0].suggestions == (str(checkpoints / "step-000001"),)
    _expect(lambda: check_checkpoint(path), "checkpoint-complete")


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "rank-0001.safetensors", "state.json"])
def test_a_truncated_file(checkpoints: Path, name: str) -> None:
    file = checkpoints / "step-000002" / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    error = _expect(lambda: load(file.parent, like=TENSORS), "checkpoint-undamaged")
    assert f"{name} has {len(content) - 1} bytes of {len(content)}" in str(error)


@pytest.mark.parametrize("name", ["rank-0000.safetensors", "rank-0001.safetensors", "state.json"])
def test_a_flipped_bit(checkpoints: Path, name: str) -> None:
    file = checkpoints / "step-000002" / name
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(bytes(content))
    error = _expect(lambda: load(file.parent, like=TENSORS), "checkpoint-undamaged")
    assert f"{name} is damaged" in str(error)
    assert error.problems[0].suggestions == (str(checkpoints / "step-000001"),)
    _expect(lambda: check_checkpoint(file.parent), "checkpoint-undamaged")


def test_two_damaged_files_are_both_named_on_every_rank(checkpoints: Path) -> None:
    for file in (checkpoints / "step-000002").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-3] + b"abc")
    _expect(
        lambda: load(checkpoints / "step-000002", like=TENSORS),
        "checkpoint-undamaged",
        "checkpoint-undamaged",
    )


@pytest.mark.parametrize("damage", ["cut", "edit", "no json", "empty", "folder", "brackets"])
def test_a_damaged_index(checkpoints: Path, damage: str) -> None:
    file = checkpoints / "step-000002" / "index.json"
    text = file.read_text()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        changed = {
            "cut": text[: len(text) // 2],
            "edit": text.replace('"step": 2', '"step": 3'),
            "no json": "hello",
            "empty": "",
            "brackets": "[" * 200_000,
        }[damage]
        assert changed != text
        file.write_text(changed)
    _expect(lambda: load(file.parent, like=TENSORS), "checkpoint-undamaged")


def _forge(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an index and give it the checksum of what it says then."""
    data = json.loads(index.read_text())
    change(data)
    del data["checksum"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    data["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    index.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", None),
        ("step", "two"),
        ("tensors", {"parameters": 7}),
        ("files", []),
        ("files", {"state.json": {"size_bytes": 3}}),
        ("mathematics", []),
    ],
)
def test_an_entry_of_an_index_that_is_missing_or_of_another_kind(
    checkpoints: Path, key: str, value: object
) -> None:
    file = checkpoints / "step-000002" / "index.json"
    _forge(file, lambda data: data.pop(key) if value is None else data.update({key: value}))
    _expect(lambda: load(file.parent, like=TENSORS), "checkpoint-undamaged")
    _expect(lambda: find_checkpoint(file.parent), "checkpoint-undamaged")


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/passwd", "..", "a/b"])
def test_a_file_outside_of_the_folder_is_not_read(checkpoints: Path, name: str) -> None:
    file = checkpoints / "step-000002" / "index.json"
    shutil.copy(file.parent / "rank-0000.safetensors", checkpoints.parent / "x.safetensors")

    def rename(data: dict[str, Any]) -> None:
        data["files"][name] = data["files"].pop("rank-0000.safetensors")

    _forge(file, rename)
    error = _expect(lambda: load(file.parent, like=TENSORS), "checkpoint-files-inside")
    assert name in str(error)


def test_tensors_in_a_file_without_a_checksum_are_not_read(checkpoints: Path) -> None:
    file = checkpoints / "step-000002" / "index.json"
    _forge(file, lambda data: data["files"].pop("rank-0000.safetensors"))
    _expect(lambda: load(file.parent, like=TENSORS), "checkpoint-undamaged")


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "7", "{", "\xff"])
def test_a_state_that_is_no_object(checkpoints: Path, text: str) -> None:
    path = checkpoints / "step-000002"
    (path / "state.json").write_text(text, encoding="latin-1")
    _expect(lambda: read_state(path), "checkpoint-undamaged")


def test_a_newer_schema(checkpoints: Path) -> None:
    file = checkpoints / "step-000002" / "index.json"
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 3'))
    error = _expect(lambda: load(file.parent, like=TENSORS), "checkpoint-schema")
    assert "this version reads schema 2" in str(error)


def test_another_model_names_the_tensors_that_differ(checkpoints: Path) -> None:
    shape = replace(SHAPE, ffn=16, layers=1, name="other")
    identity = replace(IDENTITY, mathematics=replace(IDENTITY.mathematics, model=shape))
    like = make_tensors(shape=shape)
    error = _expect(
        lambda: load(checkpoints / "step-000002", like=like, identity=identity),
        "checkpoint-same-model",
    )
    assert "layers.0.mlp.gate.weight is [12, 8] in it, [16, 8] here" in str(error)
    assert "layers.0.mlp.down.weight is [8, 12] in it, [8, 16] here" in str(error)
    assert "more" in str(error)


def test_a_model_of_another_name_is_the_same_model(checkpoints: Path) -> None:
    shape = replace(SHAPE, name="other")
    identity = replace(IDENTITY, mathematics=replace(IDENTITY.mathematics, model=shape))
    assert identity.model_hash == IDENTITY.model_hash
    load(checkpoints / "step-000002", like=TENSORS, identity=identity)


def test_tensors_that_were_never_saved_or_have_another_dtype(checkpoints: Path) -> None:
    path = checkpoints / "step-000002"
    more = {**TENSORS, "optimizer.momentum": TENSORS["parameters"]}
    error = _expect(lambda: load(path, like=more), "checkpoint-same-model")
    assert "optimizer.momentum/embedding.weight is not in it" in str(error)
    double = {k: {n: t.double() for n, t in by.items()} for k, by in TENSORS.items()}
    error = _expect(lambda: load(path, like=double), "checkpoint-same-model")
    assert "parameters/embedding.weight is F32 in it, F64 here" in str(error)


def test_another_tokenizer(checkpoints: Path) -> None:
    identity = replace(IDENTITY, tokenizer_hash="bpe-512")
    error = _expect(
        lambda: load(checkpoints / "step-000002", like=TENSORS, identity=identity),
        "checkpoint-same-tokenizer",
    )
    assert "tokenizer bytes" in str(error)
    assert "tokenizer bpe-512" in str(error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: replace(m, optimizer=replace(m.optimizer, learning_rate=1e-3)),
            "optimizer.learning_rate was 0.0003, is 0.001",
        ),
        (lambda m: replace(m, seed=3), "seed was 0, is 3"),
        (lambda m: replace(m, precision=Precision(reduction="fp64")), "precision.reduction was"),
        (lambda m: replace(m, model=replace(SHAPE, rope_theta=5e5)), "model.rope_theta was"),
    ],
)
def test_other_mathematics_names_the_entries(
    checkpoints: Path, change: Callable[..., object], said: str
) -> None:
    identity = replace(IDENTITY, mathematics=change(IDENTITY.mathematics))
    error = _expect(
        lambda: load(checkpoints / "step-000002", like=TENSORS, identity=identity),
        "checkpoint-same-mathematics",
    )
    assert said in str(error)


def test_all_differences_are_said_at_once(checkpoints: Path) -> None:
    identity = RunIdentity(
        mathematics=replace(IDENTITY.mathematics, model=replace(SHAPE, ffn=16), seed=5),
        plan_hash="other",
        tokenizer_hash="other",
    )
    error = _expect(
        lambda: load(checkpoints / "step-000002", like=TENSORS, identity=identity),
        "checkpoint-same-model",
        "checkpoint-same-tokenizer",
        "checkpoint-same-mathematics",
    )
    assert "seed was 0, is 5" in str(error)
    assert "model.ffn" not in str(error)


def test_nothing_is_changed_when_anything_is_wrong(checkpoints: Path) -> None:
    path = checkpoints / "step-000002"
    (path / "rank-0001.safetensors").write_bytes(b"")
    wanted = empty_like(cut_shards(TENSORS, by_rows, 0, 1))
    with pytest.raises(CheckpointError):
        load_checkpoint(path, wanted=wanted, identity=IDENTITY, exchange=SingleRankCommunicator())
    for by_name in wanted.values():
        for (shard,) in by_name.values():
            assert torch.equal(shard.tensor, torch.full_like(shard.tensor, 7))


def test_an_index_with_a_hole_is_refused(checkpoints: Path) -> None:
    path = checkpoints / "step-000002"
    index = read_index(path)
    name = "norm.weight"
    entry = index.tensors["parameters"][name]
    parameters = {
        **index.tensors["parameters"],
        name: replace(entry, pieces=entry.pieces[:1]),
    }
    holed = replace(index, tensors={**index.tensors, "parameters": parameters})
    (path / "index.json").write_text(holed.to_text())
    error = _expect(lambda: load(path, like=TENSORS, world_size=1), "checkpoint-covers-tensors")
    assert "parameters/norm.weight from [0]: 4 of 8" in str(error)


def test_a_copy_of_a_checkpoint_loads_from_anywhere(checkpoints: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(checkpoints / "step-000001", tmp_path / "copy")
    assert json.loads((copied / "state.json").read_text())["step"] == 1
    _, said = load(copied, like=TENSORS)
    assert said.step == 1
