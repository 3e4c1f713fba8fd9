"""DeepSpeed on CPU and Gloo. Variants: "zero" (the stage is the mode's), "autotp", "pipe".

Further ones: "ulysses" splits sequences, "accelerate" drives the engine through Accelerate. The
optimizer is its own C++ AdamW.

A stale build lock hangs every later run, so `setup_peers.sh` builds the C++ ops beforehand.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.harness.data import rank_batch
from bench.harness.spec import NotApplicable, Settings, StepFunction
from bench.peers.llama import cross_entropy, llama
from bench.peers.plain_context import local
from bench.peers.torch_cp import Attention, attend_by


def _deepspeed() -> Any:
    """Import DeepSpeed for the CPU and let it join the process group."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    extensions = Path(sys.prefix).parent / "torch_extensions"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    ninja = Path(sys.executable).parent
    os.environ["PATH"] = f"{ninja}{os.pathsep}{os.environ['PATH']}"
    logging.disable(logging.INFO)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def _config(settings: Settings) -> dict[str, Any]:
    mode = settings.mode
    rows = settings.size.global_sequences // mode.dp
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows // mode.microbatches,
        "gradient_accumulation_steps": mode.microbatches,
        # Every context rank sees all sequences, and counts as one that has its own.
        "train_batch_size": settings.size.global_sequences * mode.cp,
        "zero_optimization": {"stage": mode.zero_stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.learning_rate,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": settings.weight_decay,
            },
        },
    }
    if mode.tp > 1:
        config["tensor_parallel"] = {"autotp_size": mode.tp}
        del config["train_batch_size"]
    return config


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    deepspeed = _deepspeed()
    if settings.variant == "pipe":
        return _pipeline(settings, deepspeed)
    mode = settings.mode
    model = llama(settings)
    if settings.variant == "ulysses":
        attend_by(model, _ulysses())
    if settings.variant == "accelerate":
        return _accelerated(settings, model)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_config(settings)
    )
    dp_rank, cp_rank = dist.get_rank() // (mode.tp * mode.cp), dist.get_rank() % mode.cp
    length = settings.size.sequence // mode.cp
    mine = slice(cp_rank * length, (cp_rank + 1) * length)
    positions = torch.arange(settings.size.sequence).unsqueeze(0)[:, mine]

    def step(number: int) -> float:
        inputs, labels = (x[:, mine] for x in rank_batch(settings, number, dp_rank, mode.dp))
        logits = engine(input_ids=inputs, position_ids=positions).logits
        loss = cross_entropy(logits, labels)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _accelerated(settings: Settings, model: Any) -> StepFunction:
    """Return the step of Accelerate's loop; NotApplicable where it does not take DeepSpeed here."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DistributedType, DummyOptim

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    plugin = DeepSpeedPlugin(hf_ds_config=_config(settings))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    if accelerator.distributed_type is not DistributedType.DEEPSPEED:
        raise NotApplicable(f"Accelerate makes {accelerator.distributed_type} of it on CPUs")
    model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))

    def step(number: int) -> float:
        inputs, labels = rank_batch(settings, number, dist.get_rank(), settings.mode.dp)
        loss = cross_entropy(model(input_ids=inputs).logits, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _ulysses() -> Attention:
    """Return DeepSpeed's all-to-alls around torch's fused attention."""
    from deepspeed.sequence.layer import DistributedAttention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return local(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    whole: Any = attend
    distributed = DistributedAttention(whole, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return distributed(*rows, 0).transpose(1, 2)

    return around


class _Layer(nn.Module):
    """Wrap one decoder layer so that hidden states are all that flows."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary

    def forward(self, h_BTD: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(h_BTD.shape[1]).unsqueeze(0)
        out = self.layer(
            h_BTD,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.rotary(h_BTD, positions),
        )
        return out[0] if isinstance(out, tuple) else out


def _pipeline(settings: Settings, deepspeed: Any) -> StepFunction:
    from deepspeed.pipe import PipelineModule

    mode = settings.mode
    whole = llama(settings)
    inner = whole.model
    layers = [_Layer(layer, inner.rotary_emb) for layer in inner.layers]
    net = PipelineModule(
        layers=[inner.embed_tokens, *layers, inner.norm, whole.lm_head],
        num_stages=mode.pp,
        loss_fn=cross_entropy,
        partition_method="type:_Layer",
        activation_checkpoint_interval=0,
    )
    parameters = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=parameters, config=_config(settings)
    )
    dp_rank = engine.grid.get_data_parallel_rank()

    def step(number: int) -> float:
        inputs, labels = rank_batch(settings, number, dp_rank, mode.dp)
        chunks = zip(inputs.chunk(mode.microbatches), labels.chunk(mode.microbatches), strict=True)
        return float(engine.train_batch(iter(list(chunks))))

    return step
