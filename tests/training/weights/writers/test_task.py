"""What is asked for when weights leave: it travels to ranks, and is refused before they start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.core.choices.lora import Lora
from echelon.core.errors import ConfigError
from echelon.core.model_shape import ModelShape
from echelon.core.plan import DType
from echelon.core.serialize import from_json, to_json
from echelon.interop.hugging_face.folder import INDEX_NAME
from echelon.models.precision import TORCH_DTYPES
from echelon.training.checkpoint.index import INDEX_FILE, CheckpointIndex
from echelon.training.weights.writers.shares import Writers
from echelon.training.weights.writers.task import ExportTask, require_ranks, write_weights
from tests.parallel.layouts import GPT2, NANO
from tests.training.weights.test_export import back, drawn
from tests.training.weights.trainer_folders import stored_with_moments
from tests.training.weights.transformers_models import DEEPSEEK

NAMELESS = {
    "sinks": replace(NANO, sinks=True, soft_cap=20.0, norm_place="after"),
    "learned, after": replace(GPT2, norm_place="after", window=8),
    "latent": replace(DEEPSEEK, sinks=True, output_bias=True, norm_place="after"),
}
"""Models that leave in our names alone."""


def task_of(home: Path, shape: ModelShape = NANO, **more: Any) -> ExportTask:
    """Return a task over a checkpoint of a model, which is written once."""
    checkpoint, out = home / "checkpoint", home / "out"
    if not checkpoint.exists():
        index: CheckpointIndex = stored_with_moments(checkpoint, drawn(shape, 3), {}, step=2)
        (checkpoint / INDEX_FILE).write_text(_listed(checkpoint, index).to_text())
        out.mkdir()
    plain: dict[str, Any] = {
        **{"to": "hf", "dtype": "fp32", "model_type": None, "file_bytes": 10**9, "threads": 2},
        **{"tp": 1, "pp": 1, "adapters": False},
    }
    return ExportTask(checkpoint=str(checkpoint), folder=str(out), shape=shape, **{**plain, **more})


def _listed(folder: Path, index: CheckpointIndex) -> CheckpointIndex:
    """Return an index with the checksums of its files."""
    from echelon.core.disk import sha256_of_file
    from echelon.training.checkpoint.index import CheckpointFileEntry

    files = {
        one.name: CheckpointFileEntry(size_bytes=one.stat().st_size, sha256=sha256_of_file(one))
        for one in folder.glob("*.safetensors")
    }
    return replace(index, files=files)


def test_it_goes_to_ranks_and_back() -> None:
    shape = replace(NANO, lora=Lora(rank=2, alpha=16.0, targets=("q",)))
    task = ExportTask(
        **{"checkpoint": "c", "folder": "f", "to": "hf", "shape": shape, "dtype": "bf16"},
        **{"model_type": "llama", "file_bytes": 7, "threads": 2, "tp": 1, "pp": 1},
        adapters=False,
    )
    assert from_json(ExportTask, to_json(task)) == task
    assert task.scale == shape.lora.scale if shape.lora else False
    assert replace(task, adapters=True).scale == 0.0
    assert replace(task, shape=NANO).scale == 0.0


def test_what_was_written_is_told_and_read_back(tmp_path: Path) -> None:
    task = task_of(tmp_path, file_bytes=6_000)
    found = write_weights(task, Writers(2))
    assert (found.names, found.tensors, found.optimizer) == ("llama", 39, False)
    assert found.num_bytes == 4 * sum(one.numel() for one in drawn(NANO, 3).values())
    assert all((tmp_path / "out" / name).is_file() for name in found.files)
    read, drawn_before = back(tmp_path / "out", NANO), drawn(NANO, 3)
    assert all(read[name].equal(one) for name, one in drawn_before.items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", NAMELESS.values(), ids=NAMELESS)
def test_any_model_has_names_of_its_own(shape: ModelShape, dtype: DType, tmp_path: Path) -> None:
    """Models that no architecture and no trainer has names for: whole tensors, by our names."""
    for to in ("hf", "dcp", "deepspeed", "megatron"):
        with pytest.raises(ConfigError) as caught:
            require_ranks(task_of(tmp_path, shape, to=to), 1)
        assert all("--to echelon" in one.suggestions for one in caught.value.problems), to
    task = task_of(tmp_path, shape, to="echelon", file_bytes=6_000, dtype=dtype)
    wanted = drawn(shape, 3)
    require_ranks(task, len(wanted))
    found = write_weights(task, Writers(2))
    assert (found.names, found.tensors) == ("echelon", len(wanted))
    assert len(found.files) > 1
    table = json.loads((tmp_path / "out" / INDEX_NAME).read_text())["weight_map"]
    assert table.keys() == wanted.keys()
    assert set(table.values()) == set(found.files)
    for name, one in back(tmp_path / "out", shape).items():
        rounded = wanted[name].to(TORCH_DTYPES[dtype]).float()
        assert torch.equal(one, rounded), name


def test_ranks_without_a_part_and_models_without_names_are_refused_first(tmp_path: Path) -> None:
    require_ranks(task_of(tmp_path), 39)
    with pytest.raises(ConfigError, match="a folder of hf has 39 parts"):
        require_ranks(task_of(tmp_path), 40)
    with pytest.raises(ConfigError, match="torchtitan has no name") as caught:
        require_ranks(task_of(tmp_path, GPT2, to="dcp"), 1)
    assert caught.value.rules == ("weights-have-names",)
