"""Files of torch.save whose tensors come afterwards."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.training.weights.writers.archive import OpenArchive


def test_torch_loads_what_was_filled_in(tmp_path: Path) -> None:
    values = {"a": torch.randn(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    archive = OpenArchive(
        tmp_path / "a.pt",
        {key: (tuple(one.shape), one.dtype) for key, one in values.items()},
        lambda made: {"model": made, "step": 3},
        lambda read: read["model"],
    )
    for key in ("b", "a"):
        archive.write(key, values[key])
    archive.flush()
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found["step"] == 3
    for key, one in values.items():
        assert torch.equal(found["model"][key], one)
