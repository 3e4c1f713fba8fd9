"""A rank's file is one that the safetensors library reads, of its primary shards, bit for bit."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echelon.core.errors import EnvironmentProblem
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint import shard_file
from echelon.training.checkpoint.shard_file import DTYPE_NAMES, every_shard, write_shard_file


def shard(tensor: torch.Tensor, *offset: int, primary: bool = True) -> Shard:
    return Shard(
        name="w",
        global_shape=tuple(start + size for start, size in zip(offset, tensor.shape, strict=True)),
        offset=offset,
        tensor=tensor,
        primary=primary,
    )


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    return values.to(dtype) if dtype != torch.uint8 else values.abs().to(dtype)


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=str)
def test_every_dtype_is_stored_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = drawn(dtype, 3, 5)
    written = write_shard_file(tmp_path, "rank", {"parameters": {"w": [shard(tensor, 2, 0)]}})
    loaded = load_file(tmp_path / "rank")["parameters/w@2,0"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)
    assert written.shards[0].dtype == DTYPE_NAMES[dtype]


def test_what_is_said_of_a_file_is_what_is_in_it(tmp_path: Path) -> None:
    whole = drawn(torch.float32, 4, 6)
    shards = {
        "parameters": {
            "w": [shard(whole[:, 2:4], 0, 2), shard(whole[:, 4:], 0, 4, primary=False)],
            "empty": [shard(whole[:0], 4, 0)],
        },
        "optimizer.step": {"w": [shard(torch.tensor(3, dtype=torch.int64))]},
    }
    assert [(kind, name) for kind, name, _ in every_shard(shards)] == [
        *[("parameters", "w")] * 2,
        ("optimizer.step", "w"),
    ]
    written = write_shard_file(tmp_path, "rank", shards)
    data = (tmp_path / "rank").read_bytes()
    assert written.entry is not None
    assert written.entry.size_bytes == len(data)
    assert written.entry.sha256 == hashlib.sha256(data).hexdigest()
    # The widest elements first, and a header of whole words: all is aligned.
    assert [one.entry.key for one in written.shards] == ["optimizer.step/w@", "parameters/w@0,2"]
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    assert data[8 + length :][:8] == struct.pack("<q", 3)
    loaded = load_file(tmp_path / "rank")
    assert torch.equal(loaded["parameters/w@0,2"], whole[:, 2:4])
    assert written.shards[1].global_shape == (4, 4)
    assert (written.shards[1].entry.offset, written.shards[1].entry.shape) == ((0, 2), (4, 2))


def test_a_rank_that_is_primary_for_nothing_writes_no_file(tmp_path: Path) -> None:
    copy = shard(torch.ones(2), 0, primary=False)
    written = write_shard_file(tmp_path, "rank", {"parameters": {"w": [copy]}})
    assert written == shard_file.WrittenFile(file="rank", entry=None, shards=())
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "rank").write_text("mine")
    with pytest.raises(EnvironmentProblem):
        write_shard_file(tmp_path, "rank", {"parameters": {"w": [shard(torch.ones(2), 0)]}})
    assert (tmp_path / "rank").read_text() == "mine"
