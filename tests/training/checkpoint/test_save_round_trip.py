"""What was saved is loaded bit for bit, in any layout, and can be read without Echelon."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echelon.core.errors import CheckpointError
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.folder import find_checkpoint, find_latest, list_checkpoints
from echelon.training.checkpoint.load import check_checkpoint, load_checkpoint
from echelon.training.checkpoint.save import Snapshot, save_checkpoint
from tests.training.checkpoint.ranks import (
    IDENTITY,
    Cut,
    assert_same,
    by_columns,
    by_rows,
    load,
    make_tensors,
    save,
    whole_on,
)


def _whole(name: str, tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    return Shard(
        name=name, global_shape=shape, offset=(0,) * len(shape), tensor=tensor, primary=True
    )


CUTS: dict[str, Cut] = {"rows": by_rows, "columns": by_columns, "whole": whole_on(1)}


@pytest.mark.one_in(2)
@pytest.mark.system("S52")
@pytest.mark.parametrize("read_world", [1, 3])
@pytest.mark.parametrize("read_cut", CUTS)
@pytest.mark.parametrize("write_world", [1, 4])
@pytest.mark.parametrize("write_cut", CUTS)
def test_any_layout_reads_what_any_layout_wrote(
    tmp_path: Path, write_cut: str, write_world: int, read_cut: str, read_world: int
) -> None:
    tensors = make_tensors()
    path = save(tmp_path, tensors=tensors, cut=CUTS[write_cut], world_size=write_world, step=12)
    loaded, said = load(path, like=tensors, cut=CUTS[read_cut], world_size=read_world)
    assert_same(loaded, tensors)
    assert (said.step, dict(said.state)) == (12, {"tokens_seen": 768, "step": 12})


def test_every_dtype_and_shape_is_stored_as_it_is(tmp_path: Path) -> None:
    odd = {
        "double": torch.tensor([1.1, float("nan"), -0.0, float("inf")], dtype=torch.float64),
        "brain": torch.randn(3, 5).to(torch.bfloat16),
        "half": torch.randn(2, 3, 4).to(torch.float16),
        "steps": torch.tensor(7, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "turned": torch.randn(4, 6).t(),
        "hollow": torch.zeros(0, 4),
    }

    weights = {name: [_whole(name, t)] for name, t in make_tensors()["parameters"].items()}
    held = {name: [_whole(name, tensor)] for name, tensor in odd.items()}
    path = save_checkpoint(
        tmp_path,
        Snapshot(step=3, state={}, shards={"parameters": weights, "odd": held}),
        identity=IDENTITY,
        exchange=SingleRankCommunicator(),
    )
    wanted = {"odd": {name: [_whole(name, torch.zeros_like(t))] for name, t in odd.items()}}
    load_checkpoint(path, wanted=wanted, identity=IDENTITY, exchange=SingleRankCommunicator())
    for name, (shard,) in wanted["odd"].items():
        assert shard.tensor.dtype == odd[name].dtype
        assert (
            shard.tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
            == odd[name].contiguous().reshape(-1).view(torch.uint8).tolist()
        ), name


def test_a_tensor_that_is_a_view_and_wants_gradients_is_filled_in_place(tmp_path: Path) -> None:
    tensors = make_tensors()
    path = save(tmp_path, tensors=tensors)
    name, whole = "layers.1.mlp.down.weight", tensors["parameters"]["layers.1.mlp.down.weight"]
    flat = torch.zeros(whole.numel() + 10, requires_grad=True)
    view = flat.detach()[5:-5].view(whole.shape)
    wanted = {"parameters": {name: [_whole(name, view)]}}
    load_checkpoint(path, wanted=wanted, identity=IDENTITY, exchange=SingleRankCommunicator())
    assert torch.equal(flat.detach()[5:-5], whole.reshape(-1))
    assert flat.detach()[:5].tolist() == flat.detach()[-5:].tolist() == [0.0] * 5


def test_the_files_are_readable_with_safetensors_and_json_alone(tmp_path: Path) -> None:
    tensors = make_tensors()
    path = save(tmp_path, tensors=tensors, world_size=2)
    index = json.loads((path / "index.json").read_text())
    assert sorted(file.name for file in path.iterdir()) == [
        "index.json",
        "rank-0000.safetensors",
        "rank-0001.safetensors",
        "state.json",
    ]
    assert (index["schema"], index["step"], index["world_size"]) == (1, 1, 2)
    files = {name: load_file(path / name) for name in index["files"] if name != "state.json"}
    for kind, entries in index["tensors"].items():
        for name, entry in entries.items():
            assert entry["dtype"] == "F32"
            rows = [files[piece["file"]][piece["key"]] for piece in entry["pieces"]]
            assert torch.equal(torch.cat(rows), tensors[kind][name])


def test_only_primary_shards_are_written_and_a_rank_without_any_writes_no_file(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, cut=whole_on(2), world_size=4)
    assert [file.name for file in path.glob("*.safetensors")] == ["rank-0002.safetensors"]
    assert check_checkpoint(path).world_size == 4


def test_what_is_kept_and_found(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    for step in (5, 10, 15, 20):
        save(directory, step=step, keep=3)
    assert [checkpoint.step for checkpoint in list_checkpoints(directory)] == [10, 15, 20]
    assert find_latest(tmp_path).path == directory / "step-000020"
    assert find_checkpoint(tmp_path).step == 20
    assert find_checkpoint(directory).step == 20
    assert find_checkpoint(directory / "step-000010").step == 10
    copied = tmp_path / "best"
    (directory / "step-000010").rename(copied)
    assert find_checkpoint(copied).step == 10
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []


def test_later_checkpoints_are_not_pruned_by_an_earlier_step(tmp_path: Path) -> None:
    for step in (10, 30):
        save(tmp_path, step=step)
    save(tmp_path, step=20, keep=1)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [20, 30]


def test_a_step_beyond_six_digits_is_still_the_newest(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path / "checkpoints", step=step)
    assert find_latest(tmp_path).step == 1_000_000


def test_all_that_is_changed_on_purpose_must_be_accepted(tmp_path: Path) -> None:
    tensors = make_tensors()
    path = save(tmp_path, tensors=tensors)
    longer = replace(
        IDENTITY,
        mathematics=replace(
            IDENTITY.mathematics,
            optimizer=replace(IDENTITY.mathematics.optimizer, total_steps=999),
        ),
    )
    with pytest.raises(CheckpointError, match=r"optimizer.total_steps was 1, is 999"):
        load(path, like=tensors, identity=longer)
    loaded, _ = load(path, like=tensors, identity=longer, accept=["optimizer.total_steps"])
    assert_same(loaded, tensors)
