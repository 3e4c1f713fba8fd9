# SPDX-License-Identifier: Apache-2.0
"""A Plan -> a command of Megatron-LM: a shell script with its flags. Megatron-LM core 0.16.

`read.py` reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from echelon.core.choices.optimizers import OPTIMIZERS, PLAIN_OPTIMIZER
from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.core.plan import DTYPE_BYTES, Optimizer, Plan, Precision
from echelon.cost.seconds.stages import split_layers
from echelon.interop.formats import (
    ExportRefusal,
    ToolWriter,
    as_command,
    factor_for_ratio,
    nodes_and_ranks_per_node,
    refusals,
    without_none,
)
from echelon.interop.megatron.abilities import (
    DROPS,
    NAMES,
    NORMS,
    POSITIONS,
    RATE_SCHEDULES,
    SCOPES,
)
from echelon.interop.megatron.read_model import CLAMP, GROUPED, OFFSET, QUICK, QUICK_ALPHA, SWIGLU
from echelon.schedule.build import SCHEDULES

LAUNCHER = ("--nnodes", "--nproc-per-node")
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}

_LLAMA_3_SCALING = [1.0, 4.0, 8192]
_GROUP_SCORES = 2  # scores that rank a group


def keys(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the flags of a plan, and of the rest of its run."""
    nodes, per_node = nodes_and_ranks_per_node(plan)
    flags: dict[str, object] = {"--nnodes": nodes, "--nproc-per-node": per_node}
    flags |= _mesh_flags(plan) | _pipeline_flags(plan) | _zero_flags(plan)
    flags |= model_flags(plan) | _recompute_flags(plan) | number_flags(plan)
    return without_none(flags | _run_flags(plan, settings))


def _mesh_flags(plan: Plan) -> dict[str, object]:
    mesh, context = plan.mesh, plan.layout.context
    inner = mesh.cp > 1 and context.record.exchange == "inner"
    sizes = [context.ulysses_degree, mesh.cp // context.ulysses_degree]
    return {
        "--tensor-model-parallel-size": mesh.tp,
        "--pipeline-model-parallel-size": mesh.pp,
        "--context-parallel-size": mesh.cp,
        "--sequence-parallel": plan.layout.sequence_parallel or None,
        "--cp-comm-type": NAMES.context_kinds.get(context.kind) if mesh.cp > 1 else None,
        "--hierarchical-context-parallel-sizes": sizes if inner else None,
    }


def _pipeline_flags(plan: Plan) -> dict[str, object]:
    """Return the flags of stages: a layout lists them where they are not even."""
    pipeline, pp = plan.layout.pipeline, plan.mesh.pp
    if pp == 1:
        return {}
    if pipeline.stages != split_layers(plan.model.layers, plan.num_stages) or (
        plan.model.layers % plan.num_stages
    ):
        sizes = [f"t*{len(stage)}" if stage else "" for stage in pipeline.stages]
        sizes[0], sizes[-1] = f"E{sizes[0]}", f"{sizes[-1]}L"
        return {"--pipeline-model-parallel-layout": "|".join(sizes)}
    if pipeline.virtual_stages > 1:
        return {"--num-virtual-stages-per-pipeline-rank": pipeline.virtual_stages}
    return {}


def _zero_flags(plan: Plan) -> dict[str, object]:
    zero, mesh = plan.layout.zero, plan.mesh
    kept = zero.stage == 3 and not zero.reshard_after_forward and mesh.pp == 1
    own = zero.stage > 1 and not kept
    record = OPTIMIZERS[plan.mathematics.optimizer.kind]
    reduced = mesh.dp * mesh.cp > 1 and zero.stage < 3 and not record.needs_whole_matrices
    elements, rest = divmod(zero.bucket_bytes, DTYPE_BYTES[plan.mathematics.precision.gradients])
    copies = mesh.dp_replicate if zero.stage and mesh.dp_replicate > 1 else None
    on_host = zero.optimizer_offload == "host"
    return {
        "--use-torch-fsdp2": kept or None,
        "--torch-fsdp2-no-reshard-after-forward": kept or None,
        "--use-megatron-fsdp": own or None,
        "--data-parallel-sharding-strategy": STRATEGIES[zero.stage] if own else None,
        "--use-distributed-optimizer": own or zero.stage == 1 or None,
        "--ckpt-format": "fsdp_dtensor" if own else None,
        "--num-distributed-optimizer-instances": copies,
        "--optimizer-cpu-offload": on_host or None,
        "--optimizer-offload-fraction": 1.0 if on_host else None,
        "--overlap-grad-reduce": reduced or None,
        "--ddp-bucket-size": elements if reduced and rest == 0 else None,
        "--overlap-param-gather": zero.stage == 1 or None,
    }


def _recompute_flags(plan: Plan) -> dict[str, object]:
    recompute = plan.layout.recompute
    if recompute.policy == "selective":
        return {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
    if recompute.policy == "full" and recompute.every == 1:
        return {
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": 1,
        }
    return {}


def _run_flags(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the flags of a run around its plan: what is logged, saved, validated and read."""
    every, checks = settings.get("checkpoint.every"), settings.get("train.validate_every")
    return {
        "--log-interval": settings.get("observe.log_every", 1),
        "--seed": plan.mathematics.seed or None,
        "--save": None if every is None else "checkpoints",
        "--save-interval": every,
        "--eval-interval": checks,
        "--eval-iters": 0 if checks is None else settings.get("train.validation_batches", 8),
        "--mock-data": True,
    }


def unsupported(plan: Plan) -> Iterator[ExportRefusal]:
    """Yield what Megatron-LM cannot do, although it has words for the parts."""
    pipeline, zero, recompute = plan.layout.pipeline, plan.layout.zero, plan.layout.recompute
    pp, schedule, names = plan.mesh.pp, plan.layout.pipeline.schedule, NAMES.schedules
    kind = plan.mathematics.optimizer.kind
    unfit = pp > 1 and not SCHEDULES[schedule].fits_virtual_stages(pipeline.virtual_stages)
    two_orders = "pipelines are 1f1b, or interleaved-1f1b with several stages on a rank"
    one_order = "a rank with several stages interleaves them, one with one does not"
    kept = zero.stage == 3 and not zero.reshard_after_forward and pp > 1
    no_pipeline = "only torch's FSDP 2 keeps parameters whole there, and it has no pipeline"
    shared_muon = OPTIMIZERS[kind].needs_whole_matrices and zero.stage
    whole_state = "its Muon goes with whole optimizer state on every data rank: stage 0"
    skips_blocks = recompute.policy == "full" and recompute.every > 1
    first_ones = "it redoes every block, or the first ones of each stage"
    yield from refusals(
        (pp > 1 and schedule not in names, "pipeline.schedule", schedule, two_orders, names),
        (unfit, "pipeline.schedule", schedule, one_order, ()),
        (kept, "zero.reshard_after_forward", "never", no_pipeline, ("always",)),
        (kind not in NAMES.optimizers, "optimizer.kind", kind, f"it has no {kind}", ()),
        (shared_muon, "optimizer.kind", kind, whole_state, (PLAIN_OPTIMIZER,)),
        (skips_blocks, "recompute.every", recompute.every, first_ones, (1,)),
    )
    yield from unsupported_by_model(plan)


def render(
    flags: Mapping[str, object], header: Sequence[str], recorded: Mapping[str, object]
) -> str:
    """Return flags as a shell script."""
    return as_command(flags, header, recorded, launcher=LAUNCHER, script="pretrain_gpt.py")


def advice(plan: Plan) -> Iterator[str]:
    """Yield what the user must add."""
    nodes, _ = nodes_and_ranks_per_node(plan)
    yield "Your data and tokenizer stand instead of --mock-data: --data-path, --tokenizer-type."
    if nodes > 1:
        yield "On each node torchrun needs --node-rank, --master-addr and --master-port as well."
    if plan.mathematics.seed == 0:
        yield "Megatron-LM takes seeds from 1 on: its own default stands for train.seed = 0."


WRITER = ToolWriter(
    keys=keys, render=render, unsupported=unsupported, advice=advice, says_model=True
)


def model_flags(plan: Plan) -> dict[str, object]:
    """Return the flags of the model of a plan."""
    model = plan.model
    grouped = model.kv_heads != model.heads
    rotary, scaling = model.positions == "rope", model.rope_scaling
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
        "--kv-channels": model.head_dim if model.latent is None else None,
        **(_latent_flags(model.latent) if model.latent else {}),
        "--group-query-attention": grouped or None,
        "--num-query-groups": model.kv_heads if grouped else None,
        "--rotary-base": model.rope_theta if rotary else None,
        "--use-rope-scaling": (rotary and scaling is not None) or None,
        "--rope-scaling-factor": scaling.factor if rotary and scaling else None,
        **_gate_flags(model),
        "--untie-embeddings-and-output-weights": not model.tied or None,
        "--qk-layernorm": model.qk_norm or model.latent is not None or None,
        "--window-size": None if model.window is None else f"{model.window - 1},0",
        "--window-attn-skip-freq": _pattern(model) if model.layer_kinds else None,
        "--softmax-type": "learnable" if model.sinks else None,
        **_bias_flags(model),
    }
    return flags if model.experts is None else flags | _expert_flags(plan, model.experts)


def _gate_flags(model: ModelShape) -> dict[str, object]:
    """Return the flags of a gate: SiLU, or the clamped one of experts."""
    limit = model.experts.limit if model.experts else None
    if limit is None:
        return {SWIGLU: model.gated or None}
    return {QUICK: True, CLAMP: limit, OFFSET: 1.0}


def _pattern(model: ModelShape) -> str:
    """Return a 1 for each layer with a window, and a 0 for each without."""
    bits = (int(model.layer_kind(layer) == "local") for layer in range(model.layers))
    return f"[{','.join(map(str, bits))}]"


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


def _inner_biases(model: ModelShape) -> tuple[bool, ...]:
    """Return whether the products of an MLP, or of experts and their router, have a bias."""
    experts = model.experts
    return (model.mlp_bias,) if experts is None else (experts.bias, experts.logit_bias)


def _expert_flags(plan: Plan, experts: Experts) -> dict[str, object]:
    layers, dense = plan.model.layers, experts.first_dense_layers
    softmax_first = experts.router == "softmax" and not experts.renormalise
    grouped = experts.groups > 1
    return {
        "--num-experts": experts.num_experts,
        "--expert-model-parallel-size": plan.mesh.ep,
        "--expert-tensor-parallel-size": plan.layout.experts.expert_tp,
        "--moe-ffn-hidden-size": experts.ffn,
        "--moe-router-topk": experts.top_k,
        "--moe-router-score-function": experts.router,
        GROUPED: True,
        "--no-bias-dropout-fusion": experts.bias or None,  # It asserts so.
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-shared-expert-intermediate-size": experts.shared_experts * experts.ffn or None,
        "--moe-layer-freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else None,
        "--moe-router-pre-softmax": softmax_first or None,
        "--moe-router-topk-scaling-factor": None
        if experts.gate_scale == 1.0
        else experts.gate_scale,
        "--moe-router-num-groups": experts.groups if grouped else None,
        "--moe-router-group-topk": experts.top_groups if grouped else None,
        **_balance_flags(plan, experts),
    }


def _balance_flags(plan: Plan, experts: Experts) -> dict[str, object]:
    balance = plan.mathematics.balance
    rate = balance.bias_rate if balance.has_bias else 0.0
    drops = balance.capacity_factor is not None
    return {
        "--moe-router-load-balancing-type": SCOPES[balance.aux_over] if balance.has_aux else "none",
        "--moe-aux-loss-coeff": balance.aux_coefficient if balance.has_aux else None,
        "--moe-router-enable-expert-bias": experts.router_bias or None,
        "--moe-router-bias-update-rate": rate if experts.router_bias else None,
        "--moe-z-loss-coeff": balance.z_coefficient or None,
        "--moe-expert-capacity-factor": balance.capacity_factor,
        "--moe-token-drop-policy": DROPS[balance.drop] if drops else None,
        "--moe-pad-expert-input-to-capacity": (drops and plan.layout.experts.padded) or None,
    }


def unsupported_by_model(plan: Plan) -> Iterator[ExportRefusal]:
    """Yield what of a model Megatron-LM would compute otherwise."""
    model, tp, scaling = plan.model, plan.mesh.tp, plan.model.rope_scaling
    found = (
        []
        if scaling is None
        else [
            scaling.low_frequency_factor,
            scaling.high_frequency_factor,
            scaling.original_positions,
        ]
    )
    stretched = "frequencies are stretched as for Llama 3.1: factors 1 and 4 of 8192 positions"
    ungated = model.gated != (model.activation == "silu")
    biased = {model.output_bias, *_inner_biases(model)}
    mixed = len(biased) > 1 or (model.output_bias and not model.qkv_bias)
    biases = "all products have a bias, or none but that of queries, keys and values"
    padded = f"a vocabulary is padded to a multiple of tp = {tp}, and then is that large"
    whole = -(-model.vocab // tp) * tp
    gelu = "a gate has SiLU, and without a gate it is GELU"
    yield from refusals(
        (found not in ([], _LLAMA_3_SCALING), "model.rope_scaling", found, stretched, ()),
        (ungated, "model.activation", model.activation, gelu, ()),
        (mixed, "model.mlp_bias", model.mlp_bias, biases, ()),
        (model.vocab % tp, "model.vocab", model.vocab, padded, (whole,)),
    )
    if (experts := model.experts) is not None:
        unsummed = experts.router == "sigmoid" and experts.renormalise != (experts.top_k > 1)
        summed = "scores of a sigmoid are always made to add up to 1 where there are several"
        ranked = experts.groups > 1 and experts.top_k // experts.top_groups != _GROUP_SCORES
        best = f"a group is ranked by its best topk / groups scores, here by {_GROUP_SCORES}"
        other = experts.limit is not None and experts.alpha != QUICK_ALPHA
        clamped = f"a clamped gate is that of {QUICK}"
        yield from refusals(
            (unsummed, "model.experts.renormalise", experts.renormalise, summed, ()),
            (ranked, "model.experts.top_groups", experts.top_groups, best, ()),
            (other, "model.experts.alpha", experts.alpha, clamped, (QUICK_ALPHA,)),
        )


def number_flags(plan: Plan) -> dict[str, object]:
    """Return the flags of a plan that change numbers, but for those of the model."""
    numbers = plan.mathematics
    return {
        "--micro-batch-size": plan.layout.microbatch_sequences,
        "--global-batch-size": numbers.global_sequences,
        "--seq-length": numbers.sequence_length,
        "--reset-attention-mask": numbers.documents == "separate" or None,
        **_precision_flags(numbers.precision),
        **_optimizer_flags(numbers.optimizer),
        **_rate_flags(numbers.optimizer),
    }


def _precision_flags(precision: Precision) -> dict[str, object]:
    half = precision.parameters if precision.parameters in ("bf16", "fp16") else ""
    scaling, scale = precision.loss_scaling, precision.loss_scale
    flags: dict[str, object] = {f"--{half}": True} if half else {}
    flags |= {
        "--accumulate-allreduce-grads-in-fp32": (half and precision.gradients == "fp32") or None,
        "--grad-reduce-in-bf16": half == precision.gradients == "bf16" or None,
        "--loss-scale": scale if scaling == "fixed" else None,
    }
    if scaling == "dynamic":
        flags |= {
            "--initial-loss-scale": scale,
            "--min-loss-scale": precision.loss_scale_min,
            "--loss-scale-window": precision.loss_scale_window,
            "--hysteresis": precision.loss_scale_hysteresis,
        }
    return flags


def _optimizer_flags(optimizer: Optimizer) -> dict[str, object]:
    record = OPTIMIZERS[optimizer.kind]
    name = NAMES.optimizers.get(optimizer.kind, optimizer.kind)
    flags: dict[str, object] = {"--optimizer": name}
    if "beta1" in record.settings:
        flags |= {
            "--adam-beta1": optimizer.beta1,
            "--adam-beta2": optimizer.beta2,
            "--adam-eps": optimizer.eps,
        }
    else:
        flags["--sgd-momentum"] = optimizer.momentum
    if record.needs_whole_matrices:
        flags |= {
            "--muon-momentum": optimizer.momentum,
            "--muon-num-ns-steps": optimizer.newton_schulz_steps,
            "--muon-scale-mode": "spectral",
            "--muon-extra-scale-factor": 0.2,
            "--muon-use-nesterov": True,
            "--muon-tp-mode": "duplicated",
        }
    flags["--weight-decay"] = optimizer.weight_decay
    flags["--clip-grad"] = optimizer.clip_norm or 0.0
    return flags


def _rate_flags(optimizer: Optimizer) -> dict[str, object]:
    """Return the flags of the learning rate: it falls to the end of the run."""
    steps, peak = optimizer.total_steps, optimizer.learning_rate
    flags: dict[str, object] = {
        "--lr": peak,
        "--lr-decay-style": RATE_SCHEDULES[optimizer.schedule],
        "--train-iters": steps,
        "--lr-decay-iters": steps,
        "--lr-warmup-iters": optimizer.warmup_steps,
    }
    if optimizer.schedule != "constant":
        flags["--min-lr"] = factor_for_ratio(optimizer.final_ratio, peak)
    if optimizer.schedule == "wsd":
        flags |= {"--lr-wsd-decay-iters": optimizer.decay_steps, "--lr-wsd-decay-style": "linear"}
    return flags
