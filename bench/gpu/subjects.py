"""One training step of every framework: the same model, batch, precision and optimizer.

All have the same first values, so that losses can be compared step by step. Echelon's are a
function of seed, name and index. Plain PyTorch and transformers have the same matrices under other
names, those of queries, keys and values or of gate and up in one where they are one product.

Shape suffixes: B sequences, T positions, D hidden, V vocabulary, H heads, E head width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from bench.gpu.loads import LOADS, Load, Settings
from echelon.core.choices.kernels import FusedPiece, Kernels
from echelon.core.cluster import Cluster, Device
from echelon.core.event import NoEvents
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import parameters
from echelon.core.plan import Layout, Mathematics, Optimizer, Pipeline, Plan, Precision, Zero
from echelon.models.batch import TokenBatch
from echelon.models.counter_random import initial_values
from echelon.parallel.transport.recorder import Recorder
from echelon.training.engine import TrainEngine

Step = Callable[[], torch.Tensor | float]
"""Take one optimizer step on the next batch; return its loss."""

Batches = list[tuple[torch.Tensor, torch.Tensor]]

NUM_BATCHES = 4
_torch: Any = torch  # its stubs hide the foreach functions
FUSED: tuple[FusedPiece, ...] = ("norm", "residual", "rotary", "swiglu", "loss", "update")
"""The pieces of a Llama that are kernels of Echelon's, but in its plain case."""


class MissingPackage(Exception):
    """A framework is not installed here; the message names it."""


def build(settings: Settings) -> tuple[Step, Callable[[], None]]:
    """Return the step of a case on its device, and what gives back what it holds elsewhere."""
    torch.manual_seed(settings.seed)
    load = LOADS[settings.load]
    batches = _batches(settings, load)
    if settings.case.framework == "echelon":
        return _echelon(settings, load, batches)
    make = _plain if settings.case.framework == "plain" else _hugging_face
    with torch.device(settings.device):
        model = make(load)
    _start_alike(model, settings, load)
    return _torch_step(settings, model, batches), lambda: None


def _batches(settings: Settings, load: Load) -> Batches:
    """Return batches that recur, so that the loss falls."""
    generator = torch.Generator().manual_seed(settings.seed)
    size = (settings.sequences, load.length + 1)
    rows = [
        torch.randint(0, load.shape.vocab, size, generator=generator).to(settings.device)
        for _ in range(NUM_BATCHES)
    ]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in rows]


def _plain(load: Load) -> nn.Module:
    return PlainLlama(load.shape, load.length)


def _hugging_face(load: Load) -> nn.Module:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore
    except ImportError as error:
        raise MissingPackage("transformers is not installed") from error
    shape = load.shape
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=load.length,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore
        rms_norm_eps=shape.norm_eps,
    )
    return HuggingFaceLoss(LlamaForCausalLM(config).train())


def _start_alike(model: nn.Module, settings: Settings, load: Load) -> None:
    if isinstance(model, HuggingFaceLoss):
        set_first_values(model.model, load.shape, settings.seed, HUGGING_FACE_SOURCES)
    else:
        set_first_values(model, load.shape, settings.seed, PLAIN_SOURCES)


class MasterAdamW:
    """Fused AdamW on an fp32 copy of bf16 parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: Settings) -> None:
        """Copy the parameters."""
        self._parameters = list(parameters)
        self._masters = [nn.Parameter(p.detach().float()) for p in self._parameters]
        self._adamw = _adamw(self._masters, settings)

    @torch.no_grad()
    def step(self) -> None:
        """Update copies and parameters; drop the gradients."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        _torch._foreach_copy_(self._parameters, self._masters)


def _adamw(parameters: Iterable[nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(parameters),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _torch_step(settings: Settings, model: nn.Module, batches: Batches) -> Step:
    case = settings.case
    if case.autocast:
        adamw = _adamw(model.parameters(), settings)
    else:
        model = _as_bf16(model)
        adamw = MasterAdamW(model.parameters(), settings)
    forward: Callable[..., torch.Tensor] = model
    if case.compiled:
        # Whole: a graph break in our own plain model is an error, not a slower measurement.
        forward = torch.compile(
            model, backend=settings.compile_backend, fullgraph=case.framework == "plain"
        )
    order = itertools.cycle(batches)

    def step() -> torch.Tensor:
        tokens_BT, labels_BT = next(order)
        with torch.autocast(settings.device, torch.bfloat16, enabled=case.autocast):
            loss = forward(tokens_BT, labels_BT)
        loss.backward()
        adamw.step()
        if case.autocast:
            model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _as_bf16(model: nn.Module) -> nn.Module:
    """Turn parameters to bf16, and nothing else: rotary tables stay in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def gpu_plan(settings: Settings, known: Device | None = None) -> Plan:
    """Return the plan of one rank, with the machinery of the ZeRO stage at work.

    What is `known` of its device changes predictions only.
    """
    load, case = LOADS[settings.load], settings.case
    return Plan(
        name=f"gpu-{load.name}",
        mathematics=Mathematics(
            model=load.shape,
            global_sequences=settings.sequences,
            sequence_length=load.length,
            seed=settings.seed,
            precision=Precision(
                parameters="bf16", gradients="bf16", reduction="bf16", master="fp32"
            ),
            optimizer=Optimizer(
                learning_rate=settings.learning_rate,
                beta2=0.999,
                weight_decay=settings.weight_decay,
                decay="all",
                clip_norm=None,
                schedule="constant",
            ),
        ),
        layout=Layout(
            mesh=Mesh(),
            microbatch_sequences=settings.sequences,
            pipeline=Pipeline(stages=(tuple(range(load.shape.layers)),)),
            zero=Zero(
                stage=case.zero_stage,
                accumulate="slices" if case.zero_stage else "whole",
                optimizer_offload=case.optimizer_home,
                parameter_offload=case.parameter_home,
                offload_dir=settings.offload_dir,
            ),
            kernels=Kernels(provider=case.kernels, fused=() if case.kernels == "plain" else FUSED),
        ),
        cluster=Cluster(
            name="one-device",
            device=known or Device(name=settings.device, memory_bytes=2**40, memory_bandwidth=1e12),
            devices_per_node=1,
            nodes=1,
            links=(),
        ),
    )


def _echelon(settings: Settings, load: Load, batches: Batches) -> tuple[Step, Callable[[], None]]:
    device = torch.device(settings.device)
    engine = TrainEngine(gpu_plan(settings), Recorder(0, NoEvents()), device)
    ids = torch.arange(settings.sequences, device=device)
    ready = [TokenBatch.from_rows(tokens, labels, ids) for tokens, labels in batches]
    order = itertools.cycle(ready)
    numbers = itertools.count()

    def step() -> float:
        return engine.step([next(order)], next(numbers)).loss

    return step, engine.close


class _Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, query, kv = shape.hidden, shape.query_dim, shape.kv_dim
        self.attention_norm = nn.RMSNorm(hidden, eps=shape.norm_eps)
        self.qkv = nn.Linear(hidden, query + 2 * kv, bias=False)
        self.o = nn.Linear(query, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=shape.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, hidden, bias=False)

    def forward(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self._attend(self.attention_norm(x_BTD), cos, sin)
        gate, up = self.gate_up(self.mlp_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(fn.silu(gate) * up)

    def _attend(self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        qkv = self.qkv(x_BTD).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        out = fn.scaled_dot_product_attention(
            _turned(q, cos, sin),
            _turned(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=shape.kv_heads < shape.heads,
        )
        return self.o(out.transpose(1, 2).flatten(2))


class PlainLlama(nn.Module):
    """The decoder with its loss: forward gives the mean cross-entropy."""

    def __init__(self, shape: ModelShape, length: int) -> None:
        """Make the weights of `shape`, and rotary tables for `length` positions."""
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angle_TE = torch.outer(torch.arange(length).float(), shape.rope_theta**-half)
        self.register_buffer("cos", angle_TE.cos(), persistent=False)
        self.register_buffer("sin", angle_TE.sin(), persistent=False)

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos, self.sin)
        return mean_loss(self.head(self.norm(x_BTD)), labels_BT)


class HuggingFaceLoss(nn.Module):
    """The Llama of transformers with the same loss."""

    def __init__(self, model: nn.Module) -> None:
        """Hold a `LlamaForCausalLM`."""
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return mean_loss(self.model(input_ids=tokens_BT).logits, labels_BT)


def mean_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, computed in fp32."""
    return fn.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return out.to(x.dtype)


Sources = Mapping[str, tuple[str, ...]]
"""By the name of a parameter, ours that are in it one below the other; {} is the block."""

PLAIN_SOURCES: Sources = {
    "embedding.weight": ("embedding.weight",),
    "norm.weight": ("norm.weight",),
    "head.weight": ("head.weight",),
    "blocks.{}.attention_norm.weight": ("layers.{}.attention_norm.weight",),
    "blocks.{}.qkv.weight": tuple(f"layers.{{}}.attention.{name}.weight" for name in "qkv"),
    "blocks.{}.o.weight": ("layers.{}.attention.o.weight",),
    "blocks.{}.mlp_norm.weight": ("layers.{}.mlp_norm.weight",),
    "blocks.{}.gate_up.weight": ("layers.{}.mlp.gate.weight", "layers.{}.mlp.up.weight"),
    "blocks.{}.down.weight": ("layers.{}.mlp.down.weight",),
}

HUGGING_FACE_SOURCES: Sources = {
    "model.embed_tokens.weight": ("embedding.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("head.weight",),
    "model.layers.{}.input_layernorm.weight": ("layers.{}.attention_norm.weight",),
    **{
        f"model.layers.{{}}.self_attn.{name}_proj.weight": (f"layers.{{}}.attention.{name}.weight",)
        for name in "qkvo"
    },
    "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.mlp_norm.weight",),
    **{
        f"model.layers.{{}}.mlp.{name}_proj.weight": (f"layers.{{}}.mlp.{name}.weight",)
        for name in ("gate", "up", "down")
    },
}


@torch.no_grad()
def set_first_values(model: nn.Module, shape: ModelShape, seed: int, sources: Sources) -> None:
    """Give every parameter of a model the values with which Echelon starts, on its own device."""
    specs = {spec.name: spec for spec in parameters(shape)}
    left = dict(model.named_parameters())
    for layer in range(shape.layers):
        for name, parts in sources.items():
            parameter = left.pop(name.format(layer), None)
            if parameter is None:
                continue  # it belongs to no block, and has its values
            start = 0
            for part in parts:
                spec = specs[part.format(layer)]
                rows = parameter[start : start + spec.shape[0]]
                initial_values(shape, spec, seed, into=rows)
                start += spec.shape[0]
    if left:
        raise ValueError(f"no first values for {', '.join(left)}")
