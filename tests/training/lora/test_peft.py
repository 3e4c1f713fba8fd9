"""LoRA beside PEFT: the same adapters over the same weights, the same losses; and back again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as fn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import echelon as ec
from echelon.core.choices.lora import LINEARS, Lora
from echelon.core.errors import ConfigError
from echelon.core.event import NoEvents
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.parameters import base_shape, is_adapter
from echelon.core.plan import Optimizer
from echelon.interop.hugging_face.adapters import adapter_tensors
from echelon.interop.hugging_face.folder import hub_config
from echelon.parallel.transport.recorder import Recorder
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_weights
from tests.parallel.layouts import NANO, plan_of
from tests.parallel.one_device import make_rows
from tests.training.small_runs import TINY, small_job, trained_run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

STEPS = 20
RATE = 2e-3
ADAMW = Optimizer(learning_rate=RATE, schedule="constant", clip_norm=None, weight_decay=0.1)
RANKS = {
    "all": Lora(rank=4, alpha=8.0, targets=LINEARS),
    "q, v, stabilised": Lora(rank=3, alpha=4.0, targets=("q", "v"), rslora=True),
}


DEEPSEEK = replace(
    NANO,
    kv_heads=NANO.heads,
    head_dim=10,
    norm_eps=1e-6,
    latent=LatentAttention(query_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=6),
    experts=Experts(
        num_experts=8, top_k=3, ffn=24, shared_experts=1, first_dense_layers=1, renormalise=False
    ),
)
"""Latent attention before frozen experts."""
ITS_LAYERS = {
    "q_down": "q_a_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "q_up": "q_b_proj",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}


def module_of(base: ModelShape, model_type: str, seed: int = 3) -> Any:
    """Return a model of transformers of a shape, with weights that are not small."""
    keys: dict[str, Any] = dict(hub_config(base, model_type).keys)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**keys, "initializer_range": 0.2})
    model: Any = AutoModelForCausalLM.from_config(config)
    return model.float().eval()


@pytest.mark.quick("all")
@pytest.mark.parametrize("name", RANKS)
def test_twenty_steps_of_peft_have_the_same_losses(name: str, tmp_path: Path) -> None:
    lora = RANKS[name]
    _compare_twenty_steps(NANO, "llama", lora, [f"{one}_proj" for one in lora.targets], tmp_path)


def test_twenty_steps_over_frozen_experts_have_the_losses_of_peft(tmp_path: Path) -> None:
    """Adapters of latent attention are those that PEFT puts beside DeepSeek V2's."""
    lora = Lora(rank=4, alpha=8.0, targets=tuple(ITS_LAYERS))
    layers = list(ITS_LAYERS.values())
    _compare_twenty_steps(DEEPSEEK, "deepseek_v2", lora, layers, tmp_path)


def _compare_twenty_steps(
    plain: ModelShape, model_type: str, lora: Lora, layers: list[str], tmp_path: Path
) -> None:
    shape = replace(plain, lora=lora)
    base = module_of(plain, model_type)
    base.save_pretrained(tmp_path / "base")
    plan = plan_of(model=shape, dtype="fp32", optimizer=ADAMW)
    engine = TrainEngine(plan, Recorder(0, NoEvents()), torch.device("cpu"))
    found = find_weights(tmp_path / "base", base_shape(shape))
    held = engine.masters()
    load_weights(found, {name: held[name] for name in found.sources}, SingleRankCommunicator())

    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        target_modules=layers,
        lora_dropout=0.0,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(base, config)
    architecture = hub_config(plain, model_type).architecture
    first = {
        one.key: held[one.parts[0][0]][0].tensor.clone()
        for one in adapter_tensors(shape, architecture)
    }
    loaded = peft.set_peft_model_state_dict(theirs, first)
    assert not loaded.unexpected_keys
    trained = [one for one in theirs.parameters() if one.requires_grad]
    assert len(trained) == len(first)
    updates = torch.optim.AdamW(
        trained, lr=RATE, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps, weight_decay=0.1
    )
    losses: list[float] = []
    for step in range(STEPS):
        rows = make_rows(plan, step)
        logits = theirs(rows.inputs_BT).logits
        loss = fn.cross_entropy(logits.flatten(0, 1), rows.labels_BT.flatten(), ignore_index=-100)
        updates.zero_grad()
        loss.backward()
        updates.step()
        ours = engine.step(rank_batches(plan, rows, engine.data_rank, step), step)
        assert ours.loss == pytest.approx(float(loss.detach()), rel=1e-5), step
        losses.append(ours.loss)
    last = peft.get_peft_model_state_dict(theirs)
    for one in adapter_tensors(shape, architecture):
        mine = engine.masters()[one.parts[0][0]][0].tensor
        # Rows that turn with positions lie in another order in some families.
        runs = one.parts[0][1].runs(0, mine.shape[0])
        wanted = torch.cat([last[one.key][r.there :: r.step][: r.count] for r in runs])
        torch.testing.assert_close(mine, wanted, rtol=2e-3, atol=2e-5)
        assert not torch.equal(mine, first[one.key])


def test_a_run_from_weights_leaves_merged_and_as_adapters(tmp_path: Path) -> None:
    """transformers reads the merged folder, PEFT the adapters: the same logits."""
    job = ["lora.rank=4", "lora.alpha=64"]
    shape = small_job([*TINY, *job]).plan.model
    config: dict[str, Any] = dict(hub_config(base_shape(shape), "llama").keys)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path / "base")
    job += ["optimizer.learning_rate=0.02", "optimizer.warmup_steps=0", "mesh.tp=2"]
    run = trained_run(tmp_path, [*job, f"train.weights={tmp_path / 'base'}"])
    merged = ec.export_weights(run, tmp_path / "merged", dtype="fp32")
    alone = ec.export_weights(run, tmp_path / "adapters", dtype="fp32", adapters=True)
    assert {one.name for one in alone.folder.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    tokens = torch.arange(40).view(2, 20) % shape.vocab
    whole: Any = AutoModelForCausalLM.from_pretrained(merged.folder).eval()
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        before = base(tokens).logits
        adapted: Any = peft.PeftModel.from_pretrained(base, str(alone.folder)).eval()
        torch.testing.assert_close(adapted(tokens).logits, whole(tokens).logits, rtol=0, atol=1e-5)
        assert float((adapted(tokens).logits - before).abs().max()) > 1e-2
    stored = load_file(merged.folder / "model.safetensors")
    start = load_file(tmp_path / "base/model.safetensors")
    frozen = [name for name in stored if "proj" not in name]
    assert frozen
    assert all(torch.equal(stored[name], start[name]) for name in frozen)


SPLIT_DEEPSEEK = (
    "model.layers=2",
    "model.kv_heads=4",
    "model.norm_eps=1e-6",
    "model.tied=false",
    "model.latent.query_rank=12",
    "model.latent.kv_rank=8",
    "model.latent.nope_dim=6",
    "model.latent.rope_dim=4",
    "model.latent.value_dim=6",
    "model.head_dim=10",
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.ffn=24",
    "model.experts.shared_experts=1",
    "model.experts.first_dense_layers=1",
    "model.experts.renormalise=false",
)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_of_latent_attention_leave_merged_and_alone(tp: int, tmp_path: Path) -> None:
    """PEFT and transformers read what ranks trained; frozen experts keep their bits."""
    targets = "lora.targets=[" + ", ".join(f'"{one}"' for one in ITS_LAYERS) + "]"
    job = [*SPLIT_DEEPSEEK, "lora.rank=4", "lora.alpha=64", targets]
    plain = base_shape(small_job([*TINY, *job]).plan.model)
    base = module_of(plain, "deepseek_v2")
    base.save_pretrained(tmp_path / "base")
    job += ["optimizer.learning_rate=0.02", "optimizer.warmup_steps=0", f"mesh.tp={tp}"]
    run = trained_run(tmp_path, [*job, f"train.weights={tmp_path / 'base'}"])
    merged = ec.export_weights(run, tmp_path / "merged", dtype="fp32", model_type="deepseek_v2")
    alone = ec.export_weights(
        run, tmp_path / "alone", dtype="fp32", model_type="deepseek_v2", adapters=True
    )
    tokens = torch.arange(40).view(2, 20) % plain.vocab
    whole: Any = AutoModelForCausalLM.from_pretrained(merged.folder).eval()
    with torch.no_grad():
        before = base(tokens).logits
        adapted: Any = peft.PeftModel.from_pretrained(base, str(alone.folder)).eval()
        torch.testing.assert_close(adapted(tokens).logits, whole(tokens).logits, rtol=0, atol=1e-4)
        assert float((adapted(tokens).logits - before).abs().max()) > 1e-2
    stored = load_file(merged.folder / "model.safetensors")
    start = load_file(tmp_path / "base/model.safetensors")
    experts = [name for name in stored if ".experts." in name]
    assert experts
    assert all(torch.equal(stored[name], start[name]) for name in experts)


def test_adapters_of_a_run_without_any_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained whole"):
        adapter_tensors(NANO, hub_config(NANO, "llama").architecture)
    assert is_adapter("layers.0.mlp.up.lora_a.weight")
