"""A Plan -> a torchtitan configuration (TOML), in the keys of 0.2.2, the last that reads TOML.

`config/foreign/torchtitan.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from echelon.config.foreign.torchtitan_keys import FLAVORS, ONE_STAGE, SCHEDULES, Flavor
from echelon.core.plan import Optimizer, Plan
from echelon.planner.export.forms import as_toml, launch_of
from echelon.planner.export.settings import model_settings, plan_settings, preset_model
from echelon.planner.export.target import Refusal, Target

NAMES = {here: name for name, here in SCHEDULES.items()}
CONTEXT = {"gathered": "allgather", "ring": "alltoall"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
WHOLE = 3


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
    return found | _run_keys(settings)


def flavor_of(plan: Plan) -> tuple[str, str] | None:
    """Return the model and flavor of torchtitan that a plan trains; None where there is none."""
    return next((words for words, flavor in FLAVORS.items() if _is_flavor(plan, flavor)), None)


def _is_flavor(plan: Plan, flavor: Flavor) -> bool:
    found, wanted = preset_model(flavor.preset), plan_settings(plan)
    if found is None or (flavor.longest or inf) < plan.mathematics.sequence_length:
        return False
    name = {"model.name": flavor.name or flavor.preset}
    expected = model_settings(found[0]) | name | dict(flavor.changes)
    of_model = {key: value for key, value in wanted.items() if key.startswith("model.")}
    return expected == {**of_model, **{key: wanted.get(key) for key in flavor.changes}}


def _parallel_keys(plan: Plan) -> dict[str, object]:
    mesh, layout = plan.mesh, plan.layout
    found: dict[str, object] = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "tensor_parallel_degree": mesh.tp,
        "context_parallel_degree": mesh.cp,
        "pipeline_parallel_degree": mesh.pp,
    }
    if layout.zero.stage == WHOLE:
        word = "always" if layout.zero.reshard_after_forward else "never"
        found["fsdp_reshard_after_forward"] = word
    if mesh.cp > 1 and layout.context.kind in CONTEXT:
        found["context_parallel_rotate_method"] = CONTEXT[layout.context.kind]
    if plan.model.experts is not None:
        found["expert_parallel_degree"] = mesh.ep
        found["expert_tensor_parallel_degree"] = layout.experts.expert_tp
    if mesh.pp > 1:
        found["pipeline_parallel_schedule"] = NAMES.get(layout.pipeline.schedule, "1F1B")
        found["pipeline_parallel_microbatch_size"] = layout.microbatch_sequences
        found["module_fqns_per_model_part"] = _parts(plan)
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
    found: dict[str, object] = {
        "local_batch_size": layout.microbatch_sequences * pieces,
        "global_batch_size": numbers.global_sequences,
        "seq_len": numbers.sequence_length,
        "steps": numbers.optimizer.total_steps,
        "max_norm": numbers.optimizer.clip_norm or inf,
        "mixed_precision_param": DTYPES.get(numbers.precision.parameters, "bfloat16"),
        "mixed_precision_reduce": "float32",
    }
    if layout.zero.parameter_offload == "host":
        found["enable_cpu_offload"] = True
    if numbers.seed:
        return {f"training.{k}": v for k, v in found.items()} | {"debug.seed": numbers.seed}
    return {f"training.{name}": value for name, value in found.items()}


def _optimizer_keys(optimizer: Optimizer) -> dict[str, object]:
    found: dict[str, object] = {
        "optimizer.name": "AdamW",
        "optimizer.lr": optimizer.learning_rate,
        "optimizer.beta1": optimizer.beta1,
        "optimizer.beta2": optimizer.beta2,
        "optimizer.eps": optimizer.eps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "lr_scheduler.warmup_steps": optimizer.warmup_steps,
    }
    if optimizer.schedule == "constant":
        return found | {"lr_scheduler.decay_ratio": 0.0}
    if optimizer.schedule == "wsd":
        found["lr_scheduler.decay_ratio"] = optimizer.decay_steps / optimizer.total_steps
    kind = "cosine" if optimizer.schedule == "cosine" else "linear"
    found["lr_scheduler.decay_type"] = kind
    return found | {"lr_scheduler.min_lr_factor": optimizer.final_ratio}


def _recompute_keys(plan: Plan) -> dict[str, object]:
    recompute, table = plan.layout.recompute, "activation_checkpoint"
    if recompute.policy == "full" and recompute.every > 1:
        every = str(recompute.every)
        return {f"{table}.mode": "selective", f"{table}.selective_ac_option": every}
    return {f"{table}.mode": recompute.policy if recompute.policy != "selective" else "none"}


def _run_keys(settings: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {"metrics.log_freq": settings.get("observe.log_every", 1)}
    every = settings.get("checkpoint.every")
    found["checkpoint.enable"] = every is not None
    if every is not None:
        found["checkpoint.interval"] = every
        keep = settings.get("checkpoint.keep", 2)
        found["checkpoint.keep_latest_k"] = 0 if keep == "all" else keep
    if (every := settings.get("train.validate_every")) is not None:
        found["validation.enable"] = True
        found["validation.freq"] = every
        found["validation.steps"] = settings.get("train.validation_batches", 8)
    return found


def misfits(plan: Plan) -> Iterator[Refusal]:
    """Yield what torchtitan cannot do, although it has words for the parts."""
    pipeline, numbers = plan.layout.pipeline, plan.mathematics
    if plan.mesh.pp > 1 and pipeline.schedule not in NAMES:
        why = f"its schedules are {', '.join(NAMES)}"
        works = tuple({"pipeline.schedule": name} for name in ONE_STAGE)
        yield Refusal(setting="pipeline.schedule", value=pipeline.schedule, why=why, works=works)
    context = plan.layout.context
    if plan.mesh.cp > 1 and context.kind not in CONTEXT:
        why = "keys and values are gathered, or go around a ring in zigzag order"
        works = tuple({"context.kind": kind} for kind in CONTEXT)
        yield Refusal(setting="context.kind", value=context.kind, why=why, works=works)
    if numbers.optimizer.kind != "adamw":
        why = "the optimizer is AdamW"
        yield Refusal(setting="optimizer.kind", value=numbers.optimizer.kind, why=why)
    if plan.mesh.pp > 1 and any(not stage for stage in pipeline.stages[1:-1]):
        stages = [list(stage) for stage in pipeline.stages]
        yield Refusal(setting="pipeline.stages", value=stages, why="a stage has some module")


def advice(plan: Plan) -> Iterator[str]:
    """Yield what the user must add."""
    nodes, per_node = launch_of(plan)
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


MODEL = "its flavor, in the code of torchtitan, says every size"
ROUTER = "the model's code says how its experts are balanced"
SPEED = {
    "zero.prefetch": "one unit is gathered ahead",
    "zero.unit_blocks": "a unit is a block",
    "zero.accumulate": "gradients are reduced after every microbatch",
    "zero.keep_whole_below": "every parameter is cut",
    "zero.bucket_bytes": "the buckets of replicas are those of DDP",
    "experts.chunks": "tokens travel at once",
    "experts.dispatch": "tokens go straight to the ranks of their experts",
}
ELSEWHERE = {
    "cluster": "the launcher runs where it is started",
    "data": "training.dataset says it",
    "model": MODEL,
    "train.run_name": "job.dump_folder names a folder",
    "train.runs_dir": "job.dump_folder names a folder",
    "train.weights": "checkpoint.initial_load_path takes checkpoints of its own form",
    "train.validation_batches": "validation.steps says it",
    "train.step_timeout_s": "comm.train_timeout_seconds is of one collective",
    "checkpoint.keep": "checkpoint.keep_latest_k says it",
    "observe.events": "what is written is its own choice",
    "experts.balance": ROUTER,
    "experts.aux_coefficient": ROUTER,
    "experts.aux_over": ROUTER,
    "experts.bias_rate": ROUTER,
    "experts.z_coefficient": ROUTER,
}
REASONS = {
    "batch.documents": "its attention mask is part of a flavor",
    "zero.stage": "FSDP 2 shares parameters out as soon as there are data or context ranks to "
    'share them: stage 3, of which reshard_after_forward = "never" gathers once',
    "zero.optimizer_offload": "optimizer state and parameters are offloaded together, to the host",
    "zero.parameter_offload": "optimizer state and parameters are offloaded together, to the host",
    "mesh.sequence_parallel": "tensor ranks always cut norms and residuals too",
    "mesh.dp_shard": "ranks that share nothing out are dp_replicate",
    "context.kind": "keys and values are gathered, or go around a ring in zigzag order",
    "recompute.policy": "blocks are redone as a whole",
    "recompute.offload": "stored inputs stay on the device",
    "optimizer.decay": "every parameter decays: there is one group of them",
    "optimizer.decay_steps": "the fall is a rounded part of the steps",
    "precision": "bf16 or fp32 for parameters, and fp32 for all else",
    "experts.capacity_factor": "no token is dropped",
    "experts.drop": "no token is dropped",
    "experts.padded": "no token is dropped",
    "experts.route": "tokens go where the router sends them",
    "experts.zero_stage": "experts are shared out as all else",
    "pipeline.file": "a schedule of one's own has another form there",
}

TORCHTITAN = Target(
    kind="torchtitan",
    keys=keys,
    render=as_toml,
    misfits=misfits,
    advice=advice,
    elsewhere=ELSEWHERE,
    speed=SPEED,
    reasons=REASONS,
)
