"""Folders of torch.distributed.checkpoint that are made a chunk at a time."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from echelon.training.weights.writers.distributed import Chunk, num_files, write_distributed
from echelon.training.weights.writers.shares import Writers


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_puts_chunks_and_objects_together(tmp_path: Path) -> None:
    whole = torch.randn(3, 2, 4)
    chunks = [
        Chunk(
            key="stack",
            whole=(3, 2, 4),
            offset=(place, 0, 0),
            shape=(1, 2, 4),
            make=lambda place=place: whole[place : place + 1].clone(),
        )
        for place in range(3)
    ]
    data = io.BytesIO()
    torch.save([None], data)
    write_distributed(chunks, tmp_path, torch.float32, Writers(2), {"state": data.getvalue()})
    found = {"stack": torch.zeros(3, 2, 4), "state": "before"}
    load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["stack"], whole)
    assert found["state"] == [None]


def test_large_folders_have_more_files_than_there_are_at_least() -> None:
    assert num_files(10, 1) == 10
    assert num_files(1000, 1) == 16
    assert num_files(1000, 810 * 10**9) == 162
