"""Files of torch.save: where tensors lie, and that nothing in them runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.training.weights.pickles import NotReadable, PickledTensor, Unread, read_archive


class _Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _marked() -> torch.Tensor:
    """Return a tensor whose object has an attribute, as those of ZeRO 3 have."""
    made: Any = torch.ones(3)
    made.mark = 1
    return made


def test_tensors_are_where_the_reader_says(tmp_path: Path) -> None:
    """Views, transposed ones, and two of one storage; other objects are told, not made."""
    base = torch.arange(24.0).view(4, 6)
    content = {
        "view": base[1:3],
        "turned": base.t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "args": argparse.Namespace(tp=2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "marked": _marked(),
        "size": torch.Size((2, 3)),
    }
    file = tmp_path / "a.pt"
    torch.save(content, file)
    found = read_archive(file)
    view: PickledTensor = found["view"]
    data = file.read_bytes()[view.start : view.start + 4 * view.numel]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), base[1:3].flatten())
    assert view.contiguous
    assert not found["turned"].contiguous
    assert (found["half"].dtype, found["half"].shape) == ("BF16", (3,))
    assert isinstance(found["args"], Unread)
    assert found["args"].field("tp") == 2
    assert found["parameter"].shape == (2,)
    assert found["marked"].shape == (3,)
    assert found["size"] == (2, 3)


def test_nothing_of_a_file_runs(tmp_path: Path) -> None:
    torch.save({"evil": _Evil(tmp_path / "ran")}, tmp_path / "a.pt")
    assert isinstance(read_archive(tmp_path / "a.pt")["evil"], Unread)
    assert not (tmp_path / "ran").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save([1], file, _use_new_zipfile_serialization=False)
    with pytest.raises(NotReadable, match=r"no file of torch\.save"):
        read_archive(file)
    file.write_bytes(b"")
    with pytest.raises(NotReadable, match=r"no file of torch\.save"):
        read_archive(file)
