# SPDX-License-Identifier: Apache-2.0
"""The numbers that formulas of activations read, of a plan."""

from __future__ import annotations

from echelon.core.choices.kernels import FusedPiece
from echelon.core.choices.lora import LATENT_GROUPS, LINEAR_GROUPS
from echelon.core.model_shape import ModelShape
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.attention_working import AttentionRowChunks, attention_working_bytes
from echelon.cost.activations.numbers import CACHE_ELEMENTS, GPU_CHUNK_ELEMENTS, ActivationNumbers
from echelon.cost.bytes.context_memory import on_gpu, output_is_by_head
from echelon.cost.bytes.context_sent import kv_copies
from echelon.cost.bytes.quantised import widened_element_bytes
from echelon.cost.bytes.terms import WIDE_BYTES


def activation_numbers_from_plan(
    plan: Plan, cp_rank: int = 0, pieces: AttentionRowChunks | None = None
) -> ActivationNumbers:
    """Return the numbers of a plan on a context rank."""
    model, tp, tokens = plan.model, plan.mesh.tp, plan.local_tokens
    precision = plan.mathematics.precision
    size = DTYPE_BYTES[precision.parameters]
    heads, kv_heads = model.heads // tp, model.kv_heads // tp
    degree, gpu = plan.layout.context.ulysses_degree, on_gpu(plan)
    adds_wider = gpu and size < WIDE_BYTES and precision.gradients == "fp32"
    forward, first, run, rest = attention_working_bytes(plan, cp_rank, pieces)
    return ActivationNumbers(
        tokens=tokens,
        rows=tokens // tp if plan.layout.sequence_parallel else tokens,
        hidden=model.hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.head_dim,
        inner=model.ffn // tp,
        up=2 if model.gated else 1,
        vocab=-(-model.vocab // tp),
        size=size,
        statistics_bytes=max(WIDE_BYTES, size),
        tp=tp,
        tp_ring=int(plan.layout.tp_ring),
        tp_fused=int(plan.layout.tp_overlap == "symmetric-memory"),
        low_precision=int(size < WIDE_BYTES),
        rope=int(model.positions == "rope"),
        learned=int(model.positions == "learned"),
        qk_norm=int(model.qk_norm),
        qk_width=int(model.qk_norm_over == "width"),
        layer_norm=int(model.norm == "layernorm"),
        sinks=int(model.sinks),
        qkv_bias=int(model.qkv_bias),
        output_bias=int(model.output_bias),
        mlp_bias=int(model.mlp_bias),
        dropout=int(model.dropout > 0.0),
        multiplied=int(model.multipliers.residual != 1.0),
        embedding_multiplied=int(model.multipliers.embedding != 1.0),
        norm_before=int(model.norm_place != "after"),
        norm_after=int(model.norm_place != "before"),
        parallel=int(model.residual != "sequential"),
        one_norm=int(model.residual == "parallel-one-norm"),
        ring=int(plan.placement.ring_degree > 1),
        exchanged=int(degree > 1),
        copies=kv_copies(heads, kv_heads, degree),
        transposed=int(output_is_by_head(plan)),
        attend_forward=forward,
        attend_first=first,
        attend_run=run,
        attend_rest=rest,
        matmul_size=size,
        fp8_block=precision.fp8_block if precision.is_fp8 else 0,
        fp8_whole=int(precision.has_tensor_scales),
        fp8_wide=widened_element_bytes(precision, on_gpu=gpu),
        fp8_casts=int(plan.layout.zero.gather != "fp8"),
        mixed=int(precision.gradients != precision.parameters),
        widens=int(not adds_wider),
        chunk_elements=GPU_CHUNK_ELEMENTS if gpu else CACHE_ELEMENTS,
        fused_norm=_fused(plan, "norm"),
        fused_rotary=_fused(plan, "rotary") * (_fused(plan, "norm") or not model.qk_norm),
        fused_swiglu=_fused(plan, "swiglu"),
        # Logits of 8 bytes are for proofs, and have the way of a CPU.
        fused_loss=_fused(plan, "loss")
        * (size < DTYPE_BYTES["fp64"])
        * (model.final_soft_cap is None),
        capped_logits=int(model.final_soft_cap is not None),
        cut_sums=int(plan.layout.kernels.provider == "triton"),
        frozen=int(model.lora is not None),
        adapters=adapter_rows(model),
    )


def adapter_rows(model: ModelShape) -> tuple[int, ...]:
    """Return the rows of the A of all adapters of each of `LINEAR_GROUPS` and `LATENT_GROUPS`."""
    lora, groups = model.lora, (*LINEAR_GROUPS, *LATENT_GROUPS)
    if lora is None:
        return (0,) * len(groups)
    return tuple(lora.rank * sum(name in lora.targets for name in group) for group in groups)


def _fused(plan: Plan, piece: FusedPiece) -> int:
    return int(plan.layout.kernels.of(piece) != "plain")
