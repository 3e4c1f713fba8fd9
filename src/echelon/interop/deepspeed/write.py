# SPDX-License-Identifier: Apache-2.0
"""A Plan -> a DeepSpeed JSON. DeepSpeed 0.19.

`read.py` reads it.
Pipelines and tensor ranks are made by a script: what it must say stands in the table "echelon".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log2

from echelon.config.entries import Entry
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.plan import DTYPE_BYTES, Optimizer, Plan, Precision
from echelon.interop.deepspeed.abilities import NAMES, OFFLOAD_DEVICES, RATE_SCHEDULES, TABLES
from echelon.interop.formats import (
    ExportRefusal,
    ToolWriter,
    as_json,
    nodes_and_ranks_per_node,
    refusals,
    without_none,
)
from echelon.interop.import_context import import_context
from echelon.layout.data_groups import secondary_degree

ZERO = "zero_optimization"
_BUFFERS = {"optimizer": 4, "parameter": 1}
_TABLES = {"optimizer": "offload_optimizer", "parameter": "offload_param"}
_LEAST_SHARING = 2  # the first stage that slices gradients
WHOLE = 3  # the stage that slices everything


def keys(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a plan, and of the rest of its run."""
    mesh, numbers, pieces = plan.mesh, plan.mathematics, plan.layout.experts.expert_tp
    shared = plan.model.experts is not None and mesh.ep > 1
    host = plan.layout.recompute.offload == "host"
    found: dict[str, object] = {
        "train_batch_size": numbers.global_sequences,
        "train_micro_batch_size_per_gpu": plan.layout.microbatch_sequences,
        "gradient_accumulation_steps": plan.num_microbatches,
        "steps_per_print": settings.get("observe.log_every", 1),
        "pipeline.stages": mesh.pp if mesh.pp > 1 else None,
        "tensor_parallel.autotp_size": mesh.tp if mesh.pp == 1 < mesh.tp else None,
        "sequence_parallel_size": mesh.cp if mesh.cp > 1 else None,
        "expert_parallel.enabled": shared or None,
        "expert_parallel.autoep_size": mesh.ep if shared else None,
        "expert_parallel.expert_tensor_parallel_size": pieces if shared and pieces > 1 else None,
        **number_keys(plan),
        **_zero_keys(plan),
        "activation_checkpointing.cpu_checkpointing": host or None,
    }
    return without_none(found)


def _zero_keys(plan: Plan) -> dict[str, object]:
    zero, mesh = plan.layout.zero, plan.mesh
    size = DTYPE_BYTES[plan.mathematics.precision.gradients]
    reduced = zero.stage < WHOLE and mesh.dp * mesh.cp > 1 and zero.bucket_bytes % size == 0
    found: dict[str, object] = {
        "stage": zero.stage,
        "overlap_comm": zero.stage > 0 or None,
        "contiguous_gradients": zero.stage > 0 or None,
        "reduce_bucket_size": zero.bucket_bytes // size if reduced else None,
    }
    if zero.stage == WHOLE:
        found |= _stage_3_keys(plan)
        found["mics_shard_size"] = mesh.dp_shard if mesh.dp_replicate > 1 else None
    homes = {"optimizer": zero.optimizer_offload, "parameter": zero.parameter_offload}
    for what, home in homes.items():
        if home != "none":
            table, files = _TABLES[what], home == "nvme"
            found[f"{table}.device"] = OFFLOAD_DEVICES[home]
            found[f"{table}.pin_memory"] = True
            found[f"{table}.nvme_path"] = zero.offload_dir if files else None
            buffers = _BUFFERS[what] * zero.offload_buffers
            found[f"{table}.buffer_count"] = buffers if files else None
    return {f"{ZERO}.{name}": value for name, value in found.items()}


def _stage_3_keys(plan: Plan) -> dict[str, object]:
    """Return what bounds the gathered units, counted in elements of the largest block."""
    zero = plan.layout.zero
    block, blocks = _block_elements(plan), -(-plan.model.layers // plan.mesh.pp)
    units, kept = min(zero.prefetch, blocks), not zero.reshard_after_forward
    secondary = secondary_degree(plan)
    return {
        "zero_hpz_partition_size": secondary if secondary > 1 else None,
        "stage3_param_persistence_threshold": max(0, zero.keep_whole_below - 1),
        "stage3_prefetch_bucket_size": units * block,
        "stage3_max_reuse_distance": 2 * blocks * block if kept else 0,
        "stage3_max_live_parameters": max(blocks, units + 1) * block if kept else None,
    }


def _block_elements(plan: Plan) -> int:
    """Return the elements of the largest block on a rank, as an import counts them."""
    from echelon.config.plan_view import model_settings

    degrees = {"mesh.tp": plan.mesh.tp, "mesh.pp": plan.mesh.pp, "mesh.cp": plan.mesh.cp}
    settings = {**model_settings(plan.model), **degrees}
    context = import_context({k: Entry(value=v, source="") for k, v in settings.items()}, None)
    ep = plan.mesh.ep if plan.model.experts is not None else 1
    return context.with_degrees(ep=ep, expert_tp=plan.layout.experts.expert_tp).block_elements


def unsupported(plan: Plan) -> Iterator[ExportRefusal]:
    """Return what DeepSpeed cannot do, although it has words for the parts."""
    layout, mesh = plan.layout, plan.mesh
    schedule, stage, kind = layout.pipeline.schedule, layout.zero.stage, layout.context.kind
    optimizer = plan.mathematics.optimizer.kind
    names, kinds = NAMES.schedules, NAMES.context_kinds
    unnamed = optimizer not in NAMES.optimizers
    one_stage = "its pipeline runs 1f1b, with one stage on a rank"
    no_sharing = "its pipelines do not share out gradients: they go with stages 0 and 1"
    auto_tp = "its tensor ranks (AutoTP) go with stages 0 to 2"
    shares = mesh.pp > 1 and stage >= _LEAST_SHARING
    return refusals(
        (mesh.pp > 1 and schedule not in names, "pipeline.schedule", schedule, one_stage, names),
        (unnamed, "optimizer.kind", optimizer, f"it has no {optimizer}", ()),
        (shares, "zero.stage", stage, no_sharing, (1, 0)),
        (mesh.tp > 1 and stage == WHOLE, "zero.stage", stage, auto_tp, (2, 1)),
        (
            mesh.cp > 1 and kind not in kinds,
            "context.kind",
            kind,
            TABLES.reasons["context.kind"],
            kinds,
        ),
    )


def advice(plan: Plan) -> Iterator[str]:
    """Yield what the script and its launcher must say, as the JSON cannot."""
    nodes, per_node = nodes_and_ranks_per_node(plan)
    yield f"Start it: deepspeed --num_nodes {nodes} --num_gpus {per_node} SCRIPT."
    mesh = plan.mesh
    if mesh.pp > 1:
        sizes = ", ".join(str(len(stage)) for stage in plan.layout.pipeline.stages)
        topology = f"num_pp={mesh.pp}, num_mp={mesh.tp}, num_dp={mesh.dp}"
        yield (
            f"The JSON makes no pipeline: your script does, PipelineModule(num_stages={mesh.pp}, "
            f"topology=PipeModelDataParallelTopology({topology})); blocks of each stage "
            f"(partition_method): {sizes}."
        )
        if mesh.tp > 1:
            yield f"In it your model cuts its matrices over tp = {mesh.tp} ranks itself."
    elif mesh.tp > 1:
        yield "Tensor ranks need deepspeed.tp_model_init in your script (AutoTP)."
    if mesh.cp > 1:
        yield "Context ranks need UlyssesSPAttentionHF (ALST) in your script."
    recompute = plan.layout.recompute
    if recompute.policy != "none":
        which = "every block" if recompute.every == 1 else f"one of {recompute.every} blocks"
        yield f"Your script, or the model in it, redoes {which} in backward ({recompute.policy})."


WRITER = ToolWriter(keys=keys, render=as_json, unsupported=unsupported, advice=advice)


def number_keys(plan: Plan) -> dict[str, object]:
    """Return the keys of a plan that change numbers, but for its batch."""
    numbers = plan.mathematics
    return {
        "gradient_clipping": numbers.optimizer.clip_norm or 0.0,
        **_precision_keys(numbers.precision),
        **_optimizer_keys(numbers.optimizer),
        **_scheduler_keys(numbers.optimizer),
    }


def _precision_keys(precision: Precision) -> dict[str, object]:
    half, gradients, reduction = precision.parameters, precision.gradients, precision.reduction
    keys: dict[str, object] = {f"{half}.enabled": True} if half in ("bf16", "fp16") else {}
    keys |= {
        "data_types.grad_accum_dtype": gradients if gradients != half else None,
        "communication_data_type": reduction if reduction != half else None,
    }
    if half != "fp16":
        return keys
    if precision.loss_scaling == "fixed":
        return keys | {"fp16.loss_scale": precision.loss_scale}
    return keys | {
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": int(log2(precision.loss_scale)),
        "fp16.loss_scale_window": precision.loss_scale_window,
        "fp16.hysteresis": precision.loss_scale_hysteresis,
        "fp16.min_loss_scale": int(precision.loss_scale_min),
    }


def _optimizer_keys(optimizer: Optimizer) -> dict[str, object]:
    adam = "beta1" in OPTIMIZERS[optimizer.kind].settings
    return {
        "optimizer.type": NAMES.optimizers.get(optimizer.kind, optimizer.kind),
        "optimizer.params.lr": optimizer.learning_rate,
        "optimizer.params.weight_decay": optimizer.weight_decay,
        "optimizer.params.momentum": None if adam else optimizer.momentum,
        "optimizer.params.betas": [optimizer.beta1, optimizer.beta2] if adam else None,
        "optimizer.params.eps": optimizer.eps if adam else None,
    }


def _scheduler_keys(optimizer: Optimizer) -> dict[str, object]:
    name, cosine = RATE_SCHEDULES.get(optimizer.schedule), optimizer.schedule == "cosine"
    if name is None:
        return {}
    falls = optimizer.schedule != "constant"
    keys: dict[str, object] = {
        "type": name,
        "params.warmup_num_steps": optimizer.warmup_steps,
        "params.warmup_type": "linear",
        "params.warmup_min_ratio": 0.0 if cosine else None,
        "params.cos_min_ratio": optimizer.final_ratio if cosine else None,
        "params.warmup_min_lr": None if cosine else 0.0,
        "params.warmup_max_lr": None if cosine else optimizer.learning_rate,
        "params.total_num_steps": optimizer.total_steps if falls else None,
    }
    return {f"scheduler.{name}": value for name, value in keys.items()}
