# SPDX-License-Identifier: Apache-2.0
"""A Plan -> a torchtitan configuration (TOML), in the keys of 0.2.2, the last that reads TOML.

`read.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from echelon.config.plan_view import model_settings, plan_settings
from echelon.config.schema import SETTINGS
from echelon.core.plan import Optimizer, Plan
from echelon.interop.formats import (
    ExportRefusal,
    ToolWriter,
    as_toml,
    nodes_and_ranks_per_node,
    refusals,
    without_none,
)
from echelon.interop.plan_settings import preset_model
from echelon.interop.torchtitan.abilities import FLAVORS, NAMES, ONE_STAGE, TABLES, Flavor
from echelon.schedule.build import PLAIN_SCHEDULE

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
WHOLE = 3  # the stage that slices everything


def keys(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a plan, and of the rest of its run."""
    name, flavor = flavor_of(plan) or ("yours", plan.model.name)
    found: dict[str, object] = {
        "job.description": f"exported from the plan {plan.name}",
        "model.name": name,
        "model.flavor": flavor,
    }
    found |= _parallel_keys(plan) | _training_keys(plan)
    found |= _optimizer_keys(plan.mathematics.optimizer) | _recompute_keys(plan)
    return without_none(found | _run_keys(settings))


def flavor_of(plan: Plan) -> tuple[str, str] | None:
    """Return the model and flavor of torchtitan that a plan trains; None where there is none."""
    return next((words for words, flavor in FLAVORS.items() if _is_flavor(plan, flavor)), None)


def _is_flavor(plan: Plan, flavor: Flavor) -> bool:
    found, wanted = preset_model(flavor.preset), plan_settings(plan)
    if found is None or (flavor.longest or inf) < plan.mathematics.sequence_length:
        return False
    name = {"model.name": flavor.name or flavor.preset}
    if plan.model.lora is not None:
        return False
    of_preset = model_settings(found[0])
    expected = {key: value for key, value in of_preset.items() if key.startswith("model.")}
    expected |= name | dict(flavor.changes)
    of_model = {
        key: value
        for key, value in wanted.items()
        if key in expected or (key.startswith("model.") and value != SETTINGS[key].default)
    }
    return expected == {**of_model, **{key: wanted.get(key) for key in flavor.changes}}


def _parallel_keys(plan: Plan) -> dict[str, object]:
    mesh, layout, schedules = plan.mesh, plan.layout, NAMES.schedules
    pipeline, experts = mesh.pp > 1, plan.model.experts is not None
    reshard = "always" if layout.zero.reshard_after_forward else "never"
    word = schedules.get(layout.pipeline.schedule, schedules[PLAIN_SCHEDULE])
    rotation = NAMES.context_kinds.get(layout.context.kind) if mesh.cp > 1 else None
    found: dict[str, object] = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "tensor_parallel_degree": mesh.tp,
        "context_parallel_degree": mesh.cp,
        "pipeline_parallel_degree": mesh.pp,
        "fsdp_reshard_after_forward": reshard if layout.zero.stage == WHOLE else None,
        "context_parallel_rotate_method": rotation,
        "expert_parallel_degree": mesh.ep if experts else None,
        "expert_tensor_parallel_degree": layout.experts.expert_tp if experts else None,
        "pipeline_parallel_schedule": word if pipeline else None,
        "pipeline_parallel_microbatch_size": layout.microbatch_sequences if pipeline else None,
        "module_fqns_per_model_part": _parts(plan) if pipeline else None,
    }
    return {f"parallelism.{name}": value for name, value in found.items()}


def _parts(plan: Plan) -> list[list[str]]:
    """Return the modules of each stage by their names."""
    parts = [[f"layers.{block}" for block in stage] for stage in plan.layout.pipeline.stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _training_keys(plan: Plan) -> dict[str, object]:
    """Return what a rank reads at once, in a pipeline all of a step, and what it computes in."""
    numbers, layout = plan.mathematics, plan.layout
    pieces = plan.num_microbatches if plan.mesh.pp > 1 else 1
    offload = layout.zero.parameter_offload == "host"
    return {
        "training.local_batch_size": layout.microbatch_sequences * pieces,
        "training.global_batch_size": numbers.global_sequences,
        "training.seq_len": numbers.sequence_length,
        "training.steps": numbers.optimizer.total_steps,
        "training.max_norm": numbers.optimizer.clip_norm or inf,
        "training.mixed_precision_param": DTYPES.get(numbers.precision.parameters, "bfloat16"),
        "training.mixed_precision_reduce": "float32",
        "training.enable_cpu_offload": offload or None,
        "debug.seed": numbers.seed or None,
    }


def _optimizer_keys(optimizer: Optimizer) -> dict[str, object]:
    falls = optimizer.schedule != "constant"
    part = optimizer.decay_steps / optimizer.total_steps if optimizer.schedule == "wsd" else None
    kind = "cosine" if optimizer.schedule == "cosine" else "linear"
    return {
        "optimizer.name": "AdamW",
        "optimizer.lr": optimizer.learning_rate,
        "optimizer.beta1": optimizer.beta1,
        "optimizer.beta2": optimizer.beta2,
        "optimizer.eps": optimizer.eps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "lr_scheduler.warmup_steps": optimizer.warmup_steps,
        "lr_scheduler.decay_ratio": part if falls else 0.0,
        "lr_scheduler.decay_type": kind if falls else None,
        "lr_scheduler.min_lr_factor": optimizer.final_ratio if falls else None,
    }


def _recompute_keys(plan: Plan) -> dict[str, object]:
    recompute, table = plan.layout.recompute, "activation_checkpoint"
    if recompute.policy == "full" and recompute.every > 1:
        every = str(recompute.every)
        return {f"{table}.mode": "selective", f"{table}.selective_ac_option": every}
    return {f"{table}.mode": recompute.policy if recompute.policy != "selective" else "none"}


def _run_keys(settings: Mapping[str, object]) -> dict[str, object]:
    every, keep = settings.get("checkpoint.every"), settings.get("checkpoint.keep", 2)
    saves, checks = every is not None, settings.get("train.validate_every")
    batches = settings.get("train.validation_batches", 8)
    return {
        "metrics.log_freq": settings.get("observe.log_every", 1),
        "checkpoint.enable": saves,
        "checkpoint.interval": every,
        "checkpoint.keep_latest_k": (0 if keep == "all" else keep) if saves else None,
        "validation.enable": checks is not None or None,
        "validation.freq": checks,
        "validation.steps": None if checks is None else batches,
    }


def unsupported(plan: Plan) -> Iterator[ExportRefusal]:
    """Return what torchtitan cannot do, although it has words for the parts."""
    pipeline, mesh = plan.layout.pipeline, plan.mesh
    kind, optimizer = plan.layout.context.kind, plan.mathematics.optimizer.kind
    names, kinds = NAMES.schedules, NAMES.context_kinds
    schedule, stages = pipeline.schedule, [list(stage) for stage in pipeline.stages]
    known = f"its schedules are {', '.join(names)}"
    other_cut, why = mesh.cp > 1 and kind not in kinds, TABLES.reasons["context.kind"]
    unnamed = optimizer not in NAMES.optimizers
    empty = mesh.pp > 1 and not all(stages[1:-1])
    return refusals(
        (mesh.pp > 1 and schedule not in names, "pipeline.schedule", schedule, known, ONE_STAGE),
        (other_cut, "context.kind", kind, why, sorted(kinds)),
        (unnamed, "optimizer.kind", optimizer, "the optimizer is AdamW", ()),
        (empty, "pipeline.stages", stages, "a stage has some module", ()),
    )


def advice(plan: Plan) -> Iterator[str]:
    """Yield what the user must add."""
    nodes, per_node = nodes_and_ranks_per_node(plan)
    yield (
        f"Start it: torchrun --nnodes {nodes} --nproc-per-node {per_node} -m torchtitan.train "
        "--job.config_file FILE, with training.dataset and model.hf_assets_path of yours."
    )
    model, recompute = plan.model, plan.layout.recompute
    if flavor_of(plan) is None:
        yield (
            f"No flavor of torchtitan is {model.name}: add one to its models, with {model.layers} "
            f"layers, width {model.hidden}, {model.heads} heads, {model.kv_heads} of keys, ffn "
            f"{model.ffn}, vocabulary {model.vocab}, and name it."
        )
    if recompute.policy == "full" and recompute.every > 1:
        yield (
            f"It redoes one of {recompute.every} blocks as the plan does, but starts with block "
            f"{recompute.every - 1}, and the plan with block 0."
        )


WRITER = ToolWriter(keys=keys, render=as_toml, unsupported=unsupported, advice=advice)
