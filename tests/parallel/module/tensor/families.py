"""Tiny models of transformers, and one of our own, for tensor ranks to split."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from echelon.proof.verify.reference import StayWide

VOCAB, LENGTH, WIDTH = 37, 8, 32

_COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 4, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3Config", _GROUPED),
    "gpt_neox": ("GPTNeoXConfig", {**_COMMON, "rotary_pct": 0.5}),
    "olmo2": ("Olmo2Config", _GROUPED),
    "granite": (
        "GraniteConfig",
        {
            **_GROUPED,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "starcoder2": ("Starcoder2Config", _GROUPED),
    "mixtral": (
        "MixtralConfig",
        {**_GROUPED, "head_dim": 8, "num_local_experts": 4, "sliding_window": None},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "n_embd": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "vocab_size": VOCAB,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
}


class OwnAttention(nn.Module):
    """Attention as people write it: one matrix for q, k and v, and the heads as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.size = WIDTH // self.heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.scale = nn.Parameter(torch.ones(self.size))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one.view(*one.shape[:2], self.heads, self.size).transpose(1, 2)
            for one in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    """A block whose MLP stands in it without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = OwnAttention()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Own(nn.Module):
    """A decoder of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class OwnExperts(nn.Module):
    """Experts as stacks of matrices, called with tokens, choices and gates."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, 24, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(num_experts, WIDTH, 24) * 0.1)

    def forward(
        self, x_ND: torch.Tensor, chosen_NK: torch.Tensor, gates_NK: torch.Tensor
    ) -> torch.Tensor:
        y_ND = torch.zeros_like(x_ND)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = (chosen_NK == expert).nonzero(as_tuple=True)
            rows = F.gelu(x_ND[token] @ up.t()) @ down.t()
            y_ND = y_ND.index_add(0, token, rows * gates_NK[token, place, None])
        return y_ND


class OwnMoe(OwnBlock):
    """A block with a router and experts."""

    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.router, self.experts = nn.Linear(WIDTH, 4), OwnExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        z = self.norm2(x).flatten(0, 1)
        gates, chosen = torch.topk(self.router(z).softmax(-1), 2)
        return x + self.experts(z, chosen, gates).view_as(x)


class ListedMoe(OwnBlock):
    """A block whose experts are modules of their own, run on the tokens that chose them."""

    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        z = self.norm2(x)
        gates, chosen = self.router(z).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for expert, module in enumerate(self.experts):
            y[chosen == expert] = module(z[chosen == expert])
        return x + y * gates.unsqueeze(-1)


OWN_RULES: dict[str, Any] = {
    "tokens": "vocabulary",
    "head": "vocabulary",
    "blocks.*.attention.qkv": ("column", 3),
    "blocks.*.attention.out": "row",
    "blocks.*.attention.scale": "summed",
    "blocks.*.attention.heads": "divide",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}


EXPERT_RULES: dict[str, Any] = {
    name: rule for name, rule in OWN_RULES.items() if not name.endswith(("up", "down"))
} | {"blocks.*.experts": "expert"}

LISTED_RULES: dict[str, Any] = {
    name: rule for name, rule in OWN_RULES.items() if not name.endswith(("up", "down"))
} | {"blocks.*.experts.*.0": "column", "blocks.*.experts.*.2": "row"}

RULES = {
    "own": OWN_RULES,
    "own_moe": EXPERT_RULES,
    "own_skewed": EXPERT_RULES,
    "own_listed": LISTED_RULES,
}
"""The rules of modules of one's own, by their names; the router of one never looks at rank 1."""


def make(name: str, seed: int = 5) -> nn.Module:
    """Return a model in float64 whose every parameter is a random number, biases and norms too."""
    torch.manual_seed(seed)
    if name in RULES:
        model: nn.Module = Own()
        if name != "own":
            block = ListedMoe if name == "own_listed" else OwnMoe
            model.blocks = nn.ModuleList(block() for _ in range(2))
        for one in model.modules() if name == "own_skewed" else ():
            if isinstance(one, OwnMoe):
                nn.init.constant_(one.router.bias[:2], 100.0)
    else:
        import transformers

        config_name, values = FAMILIES[name]
        config: Any = getattr(transformers, config_name)(**values)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def batch(step: int, data_rank: int, length: int = LENGTH) -> torch.Tensor:
    """Return two rows of tokens that no other step or data rank has."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randint(VOCAB, (2, length), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next token."""
    with StayWide():
        out: Any = model(ids) if isinstance(model, Own) else model(input_ids=ids, use_cache=False)
    logits = out if torch.is_tensor(out) else out.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
