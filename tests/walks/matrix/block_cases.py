"""The blocks of other families that are proven: each kind of block in each split.

{Gemma, Granite, heads of which a part turns and blocks of which none does, norms elsewhere, local
and global blocks, sinks, caps, experts of gpt-oss, DeepSeek V2} x {alone, ZeRO-3, tp2,
tp2 + sequence parallelism, cp2 as a ring and by heads, a pipeline with B and W together and apart,
and several of these at once} x {nothing is made again, some operators are, some blocks are}. The
sequences of a microbatch and accumulation turn with the case, and over how many ranks experts are
shared out, and whether each is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product, starmap

from echelon.core.mesh import Mesh
from echelon.core.model_shape import (
    Experts,
    LatentAttention,
    ModelShape,
    Multipliers,
    RopeScaling,
    Rotary,
)
from echelon.core.plan import Layout, Plan, Recompute
from tests.walks.matrix.cases import MatrixCase, shared_out, varied_model, varied_optimizer
from tests.walks.matrix.recompute_cases import SPLITS, split_layout

AGAIN: Mapping[str, Recompute] = {
    "none": Recompute(),
    "norm-attention": Recompute(policy="selective", operators=("attention", "norm")),
    "norm-mlp": Recompute(policy="selective", operators=("mlp", "norm")),
    "activation": Recompute(policy="selective", operators=("activation",)),
    "full": Recompute(policy="full", every=2),
}
"""What is made again, by name."""


def _gemma(model: ModelShape) -> ModelShape:
    return replace(
        model,
        tied=True,
        activation="gelu",
        norm_offset=1.0,
        multipliers=Multipliers(embedding=model.hidden**0.5),
    )


def _granite(model: ModelShape) -> ModelShape:
    return replace(
        model,
        multipliers=Multipliers(embedding=3.0, residual=0.3, logits=0.25),
        attention_scale=0.5,
        activation="gelu-exact",
        mlp_bias=True,
    )


def _partly_turned(model: ModelShape) -> ModelShape:
    rotary = Rotary(fraction=0.5, interleaved=True, none_every=2)
    return replace(model, rotary=rotary, qkv_bias=True)


def _olmo2(model: ModelShape) -> ModelShape:
    return replace(model, norm_place="after", qk_norm=True, qk_norm_over="width")


def _glm4(model: ModelShape) -> ModelShape:
    return replace(_partly_turned(model), norm_place="both")


def _neox(model: ModelShape) -> ModelShape:
    return replace(
        model,
        kv_heads=model.heads,
        residual="parallel",
        norm="layernorm",
        gated=False,
        activation="gelu-exact",
        rotary=Rotary(fraction=0.25),
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
    )


def _falcon(model: ModelShape) -> ModelShape:
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False)
    return replace(_neox(model), residual="parallel-one-norm", rotary=Rotary(), **biases)


def _gemma3(model: ModelShape) -> ModelShape:
    return replace(
        _gemma(model),
        norm_place="both",
        qk_norm=True,
        window=5,
        layer_kinds=("local", "global"),
        local_rope_theta=100.0,
        rope_theta=10_000.0,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
        attention_scale=0.4,
        soft_cap=4.0,
        final_soft_cap=6.0,
    )


def _gpt_oss_attention(model: ModelShape) -> ModelShape:
    stretch = RopeScaling(kind="yarn", factor=4.0, original_positions=64, whole_dims=False)
    return replace(
        model,
        sinks=True,
        window=5,
        layer_kinds=("local", "global"),
        rope_scaling=stretch,
        qkv_bias=True,
        output_bias=True,
    )


def _gpt_oss(model: ModelShape) -> ModelShape:
    experts = Experts(
        num_experts=8,
        top_k=3,
        ffn=model.ffn,
        logit_bias=True,
        bias=True,
        limit=0.05,
        alpha=1.5,
    )
    return replace(_gpt_oss_attention(model), experts=experts)


def _deepseek_v2(model: ModelShape) -> ModelShape:
    experts = Experts(
        num_experts=8,
        top_k=3,
        ffn=model.ffn,
        shared_experts=2,
        first_dense_layers=1,
        renormalise=False,
        gate_scale=4.0,
        groups=4,
        top_groups=2,
        group_score="max",
    )
    latent = LatentAttention(query_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=6)
    return replace(model, kv_heads=model.heads, head_dim=10, latent=latent, experts=experts)


def _deepseek_v2_lite(model: ModelShape) -> ModelShape:
    deepseek = _deepseek_v2(model)
    assert deepseek.latent is not None, "as written above"
    return replace(deepseek, latent=replace(deepseek.latent, query_rank=None))


BLOCKS: Mapping[str, Callable[[ModelShape], ModelShape]] = {
    "gemma": _gemma,
    "granite": _granite,
    "partly-turned": _partly_turned,
    "olmo2": _olmo2,
    "glm4": _glm4,
    "neox": _neox,
    "falcon": _falcon,
    "gemma3": _gemma3,
    "gpt-oss-attention": _gpt_oss_attention,
    "gpt-oss": _gpt_oss,
    "deepseek-v2": _deepseek_v2,
    "deepseek-v2-lite": _deepseek_v2_lite,
}
"""What makes each kind out of a Llama."""

_NOT_AGAIN: Mapping[str, tuple[str, ...]] = {
    "gpt-oss": ("norm-mlp", "activation"),
    "deepseek-v2": ("norm-mlp", "activation", "norm-attention"),
    "deepseek-v2-lite": ("norm-mlp", "activation", "norm-attention"),
}
"""What of `AGAIN` blocks do not have whose MLPs are experts, or that have latent attention."""


def has_experts(block: str) -> bool:
    """Return whether the blocks of a kind are mixtures of experts."""
    return block in _NOT_AGAIN


@dataclass(frozen=True, slots=True)
class BlockCase(MatrixCase):
    """Name a kind of block in one layout."""

    block: str
    split: str
    again: str

    @property
    def name(self) -> str:
        return f"block-{self.block}-{self.split}-{self.again}"

    @property
    def mesh(self) -> Mesh:
        return self._layout.mesh

    @property
    def _layout(self) -> Layout:
        split, seed = SPLITS[self.split], self.seed
        layout = split_layout(split, [2] * split.mesh.pp, AGAIN[self.again], seed)
        if not has_experts(self.block):
            return layout
        return shared_out(layout, cut=seed // 16 % 3 == 0, ep=1 if seed // 48 % 4 == 0 else 2)

    def plan(self) -> Plan:
        seed, layout, counts = self.seed, self._layout, [2] * self.mesh.pp
        # The first of the four kinds is a Llama.
        llama = varied_model(0, tp=self.mesh.tp, layers=sum(counts), tied=seed // 8 % 2 > 0)
        count = self.mesh.pp * (1 + seed // 2 % 2)
        model = BLOCKS[self.block](llama)
        return self.plan_of(layout, count, model=model, optimizer=varied_optimizer(seed))


def block_cases() -> Iterator[BlockCase]:
    """Return every case of blocks of other families."""
    every = starmap(BlockCase, product(BLOCKS, SPLITS, AGAIN))
    return (case for case in every if case.again not in _NOT_AGAIN.get(case.block, ()))
