"""Files of Hugging Face that are made before their tensors, each of which knows its place."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echelon.core.errors import EnvironmentProblem
from echelon.interop.hugging_face.folder import folder_tensors, hub_config, share_out
from echelon.training.weights.export import open_model
from echelon.training.weights.writers.shares import Writers
from echelon.training.weights.writers.task import write_files
from tests.parallel.layouts import NANO
from tests.training.weights.test_export import drawn, stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_do_not_depend_on_the_threads(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = drawn(NANO, 3)
    index = stored(tmp_path / "checkpoint", tensors, 5)
    parts = folder_tensors(NANO, hub_config(NANO).architecture)
    model = open_model(tmp_path / "checkpoint", index, parts)
    files = share_out(parts, dtype.itemsize, 6_000)
    assert len(files) > 2
    found: list[dict[str, str]] = []
    for threads in (1, 4):
        out = tmp_path / f"out-{threads}"
        out.mkdir()
        write_files(model, files, out, dtype, Writers(threads))
        found.append(
            {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in out.iterdir()}
        )
    assert found[0] == found[1]
    assert set(found[0]) == set(files)
    whole = {key: value for name in files for key, value in load_file(out / name).items()}
    assert set(whole) == {one.key for one in parts}
    assert torch.equal(whole["model.norm.weight"], tensors["norm.weight"].to(dtype))


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    index = stored(tmp_path / "checkpoint", drawn(NANO, 3), 5)
    parts = folder_tensors(NANO, hub_config(NANO).architecture)
    model = open_model(tmp_path / "checkpoint", index, parts)
    with pytest.raises(EnvironmentProblem):
        write_files(model, {"a": parts}, tmp_path / "nowhere", torch.float32, Writers(1))
