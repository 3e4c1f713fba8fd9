"""The flags of Megatron-LM for a model: its sizes, norms, positions and experts."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.plan import Plan
from echelon.planner.export.target import Refusal

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
POSITIONS = {"learned": "learned_absolute", "rope": "rope"}
SCOPES = {"microbatch": "aux_loss", "sequence": "seq_aux_loss", "global": "global_aux_loss"}
DROPS = {"score": "probs", "position": "position"}
LLAMA_3_SCALING = (1.0, 4.0, 8192)
GROUP_SCORES = 2


def model_flags(plan: Plan) -> dict[str, object]:
    """Return the flags of the model of a plan."""
    model = plan.model
    flags: dict[str, object] = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.ffn,
        "--num-attention-heads": model.heads,
        "--max-position-embeddings": model.max_positions,
        "--vocab-size": model.vocab,
        "--make-vocab-size-divisible-by": 1,
        "--normalization": NORMS[model.norm],
        "--norm-epsilon": model.norm_eps,
        "--init-method-std": model.initial_std,
        "--hidden-dropout": model.dropout,
        "--attention-dropout": 0.0,
        "--position-embedding-type": POSITIONS[model.positions],
    }
    if model.latent is None:
        flags["--kv-channels"] = model.head_dim
    else:
        flags |= _latent_flags(model.latent)
    if model.kv_heads != model.heads:
        flags |= {"--group-query-attention": True, "--num-query-groups": model.kv_heads}
    if model.positions == "rope":
        flags["--rotary-base"] = model.rope_theta
        if model.rope_scaling is not None:
            flags["--use-rope-scaling"] = True
            flags["--rope-scaling-factor"] = model.rope_scaling.factor
    if model.gated:
        flags["--swiglu"] = True
    if not model.tied:
        flags["--untie-embeddings-and-output-weights"] = True
    if model.qk_norm:
        flags["--qk-layernorm"] = True
    if model.window is not None:
        flags["--window-size"] = f"{model.window - 1},0"
    flags |= _bias_flags(model)
    return flags if model.experts is None else flags | _expert_flags(plan, model.experts)


def _latent_flags(latent: LatentAttention) -> dict[str, object]:
    return {
        "--multi-latent-attention": True,
        "--q-lora-rank": latent.query_rank,
        "--kv-lora-rank": latent.kv_rank,
        "--qk-head-dim": latent.nope_dim,
        "--qk-pos-emb-head-dim": latent.rope_dim,
        "--v-head-dim": latent.value_dim,
        "--qk-layernorm": True,
        "--rope-type": "rope",
    }


def _bias_flags(model: ModelShape) -> dict[str, object]:
    """Return the flags of biases: all, none, or those of queries, keys and values."""
    if model.mlp_bias or model.output_bias:
        return {}
    flags: dict[str, object] = {"--disable-bias-linear": True}
    return flags | ({"--add-qkv-bias": True} if model.qkv_bias else {})


def _expert_flags(plan: Plan, experts: Experts) -> dict[str, object]:
    layers, dense = plan.model.layers, experts.first_dense_layers
    flags: dict[str, object] = {
        "--num-experts": experts.num_experts,
        "--expert-model-parallel-size": plan.mesh.ep,
        "--expert-tensor-parallel-size": plan.layout.experts.expert_tp,
        "--moe-ffn-hidden-size": experts.ffn,
        "--moe-router-topk": experts.top_k,
        "--moe-router-score-function": experts.router,
        "--moe-grouped-gemm": True,
        "--moe-token-dispatcher-type": "alltoall",
    }
    if experts.shared_experts:
        flags["--moe-shared-expert-intermediate-size"] = experts.shared_experts * experts.ffn
    if dense:
        flags["--moe-layer-freq"] = f"([0]*{dense}+[1]*{layers - dense})"
    if experts.router == "softmax" and not experts.renormalise:
        flags["--moe-router-pre-softmax"] = True
    if experts.gate_scale != 1.0:
        flags["--moe-router-topk-scaling-factor"] = experts.gate_scale
    if experts.groups > 1:
        flags["--moe-router-num-groups"] = experts.groups
        flags["--moe-router-group-topk"] = experts.top_groups
    return flags | _balance_flags(plan, experts)


def _balance_flags(plan: Plan, experts: Experts) -> dict[str, object]:
    balance = plan.mathematics.balance
    flags: dict[str, object] = {"--moe-router-load-balancing-type": "none"}
    if balance.has_aux:
        flags["--moe-router-load-balancing-type"] = SCOPES[balance.aux_over]
        flags["--moe-aux-loss-coeff"] = balance.aux_coefficient
    if experts.router_bias:
        rate = balance.bias_rate if balance.has_bias else 0.0
        flags |= {"--moe-router-enable-expert-bias": True, "--moe-router-bias-update-rate": rate}
    if balance.z_coefficient:
        flags["--moe-z-loss-coeff"] = balance.z_coefficient
    if balance.capacity_factor is not None:
        flags["--moe-expert-capacity-factor"] = balance.capacity_factor
        flags["--moe-token-drop-policy"] = DROPS[balance.drop]
        if plan.layout.experts.padded:
            flags["--moe-pad-expert-input-to-capacity"] = True
    return flags


def model_misfits(plan: Plan) -> Iterator[Refusal]:
    """Yield what of a model Megatron-LM would compute otherwise."""
    model = plan.model
    scaling = model.rope_scaling
    if scaling is not None:
        found = (
            scaling.low_frequency_factor,
            scaling.high_frequency_factor,
            scaling.original_positions,
        )
        if found != LLAMA_3_SCALING:
            why = "frequencies are stretched as for Llama 3.1: factors 1 and 4 of 8192 positions"
            yield Refusal(setting="model.rope_scaling", value=list(found), why=why)
    if model.gated != (model.activation == "silu"):
        why = "a gate has SiLU, and without a gate it is GELU"
        yield Refusal(setting="model.activation", value=model.activation, why=why)
    if (model.mlp_bias, model.output_bias) in ((True, False), (False, True)) or (
        model.mlp_bias and not model.qkv_bias
    ):
        why = "all products have a bias, or none but that of queries, keys and values"
        yield Refusal(setting="model.mlp_bias", value=model.mlp_bias, why=why)
    if model.vocab % plan.mesh.tp:
        whole = -(-model.vocab // plan.mesh.tp) * plan.mesh.tp
        why = f"a vocabulary is padded to a multiple of tp = {plan.mesh.tp}, and then is that large"
        works = ({"model.vocab": whole},)
        yield Refusal(setting="model.vocab", value=model.vocab, why=why, works=works)
    if model.experts is not None:
        yield from _expert_misfits(model.experts)


def _expert_misfits(experts: Experts) -> Iterator[Refusal]:
    if experts.router == "sigmoid" and experts.renormalise != (experts.top_k > 1):
        why = "scores of a sigmoid are always made to add up to 1 where there are several"
        yield Refusal(setting="model.experts.renormalise", value=experts.renormalise, why=why)
    if experts.groups > 1 and experts.top_k // experts.top_groups != GROUP_SCORES:
        why = f"a group is ranked by its best topk / groups scores, here by {GROUP_SCORES}"
        yield Refusal(setting="model.experts.top_groups", value=experts.top_groups, why=why)
