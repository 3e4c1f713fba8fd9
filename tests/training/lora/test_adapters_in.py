"""A run starts from the adapters of PEFT, or from its own export, under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import echelon as ec
from echelon.core.errors import CheckpointError, ConfigError
from echelon.core.parameters import base_shape
from echelon.interop.hugging_face.folder import hub_config
from tests.training.small_runs import TINY, small_job, trained_run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LORA = ("lora.rank=4", "lora.alpha=64")
STILL = ("train.steps=1", "optimizer.learning_rate=1e-30", "optimizer.warmup_steps=0")
"""A step that moves no weight by a bit."""

GLM = ("model.rotary.interleaved=true", "model.rotary.fraction=0.5", "model.qkv_bias=true")
"""Rows of q and k that transformers has in another order."""


def base_folder(folder: Path, settings: tuple[str, ...], model_type: str) -> Path:
    """Write a model of transformers of the shape of a tiny run, with weights that are not small."""
    shape = base_shape(small_job([*TINY, *settings]).plan.model)
    config: dict[str, Any] = dict(hub_config(shape, model_type).keys)
    torch.manual_seed(0)
    keys = AutoConfig.for_model(**{**config, "initializer_range": 0.2})
    model: Any = AutoModelForCausalLM.from_config(keys)
    model.float().save_pretrained(str(folder))
    return folder


def peft_folder(folder: Path, base: Path, **keys: Any) -> Path:
    """Write adapters of PEFT beside q and v of a model, none of which is zero."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **keys
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, one in adapted.named_parameters():
        if "lora_" in name:
            one.data.normal_(std=0.1)
    adapted.save_pretrained(str(folder))
    return folder


def logits(base: Path, adapters: Path | None = None) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapters)).eval()
    with torch.no_grad():
        return model(torch.arange(40).view(2, 20)).logits


@pytest.mark.slow
def test_adapters_of_peft_are_what_a_run_starts_from(tmp_path: Path) -> None:
    """Split over tensor ranks and merged on the way out, they give PEFT's logits."""
    base = base_folder(tmp_path / "base", (), "llama")
    theirs = peft_folder(tmp_path / "theirs", base, lora_dropout=0.1)
    job = [*LORA, 'lora.targets=["q", "v"]', f"train.weights={base}", f"train.adapters={theirs}"]
    run = trained_run(tmp_path, [*job, *STILL, "mesh.tp=2"])
    merged = ec.export_weights(run, tmp_path / "merged", dtype="fp32")
    wanted = logits(base, theirs)
    torch.testing.assert_close(logits(merged.folder), wanted, rtol=0, atol=1e-4)
    assert float((wanted - logits(base)).abs().max()) > 1e-2


def test_other_adapters_than_the_run_asks_for_are_refused_before_a_rank_starts(
    tmp_path: Path,
) -> None:
    theirs = peft_folder(tmp_path / "theirs", base_folder(tmp_path / "base", (), "llama"))
    with pytest.raises(CheckpointError) as caught:
        trained_run(tmp_path, ["lora.rank=4", "lora.alpha=64", f"train.adapters={theirs}"])
    assert caught.value.problems[0].suggestions == ('lora.targets = ["q", "v"]',)
    with pytest.raises(ConfigError, match=r"train\.adapters"):
        trained_run(tmp_path, [f"train.adapters={theirs}"])


@pytest.mark.slow
def test_adapters_beside_rows_in_another_order_are_those_of_peft(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", GLM, "glm")
    theirs = peft_folder(tmp_path / "theirs", base)
    job = [*LORA, *GLM, 'lora.targets=["q", "v"]', f"train.weights={base}"]
    run = trained_run(tmp_path, [*job, f"train.adapters={theirs}", *STILL, "mesh.tp=2"])
    merged = ec.export_weights(run, tmp_path / "merged", dtype="fp32")
    alone = ec.export_weights(run, tmp_path / "alone", dtype="fp32", adapters=True)
    wanted = logits(base, theirs)
    torch.testing.assert_close(logits(merged.folder), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(base, alone.folder), wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("mesh.dp_shard=2", "zero.stage=3"),
        ("mesh.pp=2", "pipeline.schedule=zb-h1"),
        ("mesh.tp=2", "mesh.sequence_parallel=true"),
    ],
    ids=["zero 3", "stages", "tensor"],
)
def test_our_own_export_goes_on_bit_for_bit(layout: tuple[str, ...], tmp_path: Path) -> None:
    job = [*LORA, "optimizer.learning_rate=0.02", "train.steps=3", "optimizer.warmup_steps=0"]
    first = ec.export_weights(
        trained_run(tmp_path, [*job, "mesh.tp=2"]), tmp_path / "a", dtype="fp32", adapters=True
    )
    again = [*LORA, *STILL, f"train.adapters={first.folder}", *layout]
    (tmp_path / "again").mkdir()
    run = trained_run(tmp_path / "again", again)
    second = ec.export_weights(run, tmp_path / "b", dtype="fp32", adapters=True)
    before = load_file(first.folder / "adapter_model.safetensors")
    after = load_file(second.folder / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(bool(before[name].any()) for name in before)
