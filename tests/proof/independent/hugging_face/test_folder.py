"""A folder is read as it is: its numbers in float64, and an error for missing tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.core.plan import Plan
from echelon.proof.independent.hugging_face.beside import InFloat64, build
from echelon.proof.independent.hugging_face.configuration import transformers_model
from echelon.proof.independent.hugging_face.folder import FolderModel
from echelon.proof.independent.weights import first_values
from echelon.proof.shrink import shrink
from echelon.proof.whole_run.one_device import logits_of, text_run
from tests.proof.layouts import layout

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def plan() -> Plan:
    return shrink(layout(), precision="fp64")


@pytest.fixture
def weights(plan: Plan) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in first_values(plan.model, 0).items()}


@pytest.fixture
def folder(plan: Plan, weights: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """Save a model of transformers by its own code, with first weights of ours."""
    description = transformers_model(plan)
    assert not isinstance(description, str)
    with InFloat64():
        build(description).save_pretrained(tmp_path)
    given = FolderModel(tmp_path).given(plan.model, weights, {})
    save_file({name: one.clone() for name, one in given.items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_logits_are_those_of_the_weights(
    folder: Path, plan: Plan, weights: dict[str, torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    right = text_run(plan, weights, {}, TOKENS)
    model = FolderModel(folder)
    assert capfd.readouterr().err == ""
    torch.testing.assert_close(model.logits(TOKENS), logits_of(right), rtol=1e-10, atol=1e-12)
    assert model.first_part_unlike(plan, right) is None
    stated = FolderModel(folder, load_file(folder / "model.safetensors"))
    assert torch.equal(stated.logits(TOKENS), model.logits(TOKENS))
    assert model.state().keys() == model.given(plan.model, weights, {}).keys()


def test_the_first_part_that_differs_is_told(
    folder: Path, plan: Plan, weights: dict[str, torch.Tensor]
) -> None:
    right = text_run(plan, weights, {}, TOKENS)
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"] *= 2
    part = FolderModel(folder, state).first_part_unlike(plan, right)
    assert part is not None
    assert (part.part, part.unit) == ("MLP", "layers.1")


def test_what_a_folder_lacks_is_an_error(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    with pytest.raises(ValueError, match=r"it lacks model\.norm\.weight"):
        FolderModel(folder, state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"it lacks model\.norm\.weight"):
        FolderModel(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))
    with pytest.raises(ValueError, match="nothing"):
        FolderModel(folder)
