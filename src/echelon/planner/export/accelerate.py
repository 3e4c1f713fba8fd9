"""A Plan -> an Accelerate YAML: FSDP 2, the DeepSpeed plugin, or plain data parallelism.

Stage 3 is FSDP 2, with tensor and context ranks in parallelism_config; stages 1 and 2 are
DeepSpeed's; stage 0 is DDP. `config/foreign/accelerate.py` reads it. Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from echelon.core.plan import Plan
from echelon.planner.export.forms import as_yaml, launch_of
from echelon.planner.export.target import Refusal, Target

CONTEXT = {"gathered": "allgather", "ring": "alltoall"}
MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
DEVICES = {"none": "none", "host": "cpu", "nvme": "nvme"}
MESH = "parallelism_config.parallelism_config"
WHOLE = 3


def keys(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a plan."""
    nodes, _ = launch_of(plan)
    kind = kind_of(plan)
    found: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_machines": nodes,
        "num_processes": plan.mesh.world_size,
        "mixed_precision": MIXED.get(plan.mathematics.precision.parameters, "no"),
    }
    if kind == "FSDP":
        found |= _fsdp_keys(plan) | _mesh_keys(plan)
    elif kind == "DEEPSPEED":
        found |= _plugin_keys(plan)
    return found


def kind_of(plan: Plan) -> str:
    """Return how Accelerate would train a plan."""
    stage = plan.layout.zero.stage
    if stage == 0:
        one = plan.mesh.world_size == 1
        return "NO" if one else "MULTI_GPU" if plan.cluster.backend == "nccl" else "MULTI_CPU"
    return "FSDP" if stage == WHOLE else "DEEPSPEED"


def _fsdp_keys(plan: Plan) -> dict[str, object]:
    zero, blocks = plan.layout.zero, -(-plan.model.layers // plan.mesh.pp)
    wrap = "NO_WRAP" if zero.unit_blocks == blocks > 1 else "TRANSFORMER_BASED_WRAP"
    found: dict[str, object] = {
        "version": 2,
        "auto_wrap_policy": wrap,
        "reshard_after_forward": zero.reshard_after_forward,
        "offload_params": zero.parameter_offload == "host",
        "activation_checkpointing": plan.layout.recompute.policy == "full",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if plan.layout.recompute.offload == "host":
        found["activation_checkpointing_offload"] = True
    return {f"fsdp_config.fsdp_{name}": value for name, value in found.items()}


def _mesh_keys(plan: Plan) -> dict[str, object]:
    mesh = plan.mesh
    if mesh.dp_shard == mesh.world_size:
        return {}
    found: dict[str, object] = {
        f"{MESH}_dp_replicate_size": mesh.dp_replicate,
        f"{MESH}_dp_shard_size": mesh.dp_shard,
        f"{MESH}_tp_size": mesh.tp,
        f"{MESH}_cp_size": mesh.cp,
    }
    kind = plan.layout.context.kind
    if mesh.cp > 1 and kind in CONTEXT:
        found[f"{MESH}_cp_comm_strategy"] = CONTEXT[kind]
    return found


def _plugin_keys(plan: Plan) -> dict[str, object]:
    zero = plan.layout.zero
    found: dict[str, object] = {
        "zero_stage": zero.stage,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": plan.mathematics.optimizer.clip_norm or 0.0,
        "offload_optimizer_device": DEVICES[zero.optimizer_offload],
        "offload_param_device": "none",
    }
    if zero.optimizer_offload == "nvme":
        found["offload_optimizer_nvme_path"] = zero.offload_dir
    return {f"deepspeed_config.{name}": value for name, value in found.items()}


def misfits(plan: Plan) -> Iterator[Refusal]:
    """Yield what Accelerate cannot do, although it has words for the parts."""
    mesh, kind, layout = plan.mesh, kind_of(plan), plan.layout
    if mesh.pp > 1:
        why = "there is no pipeline for training"
        yield Refusal(setting="mesh.pp", value=mesh.pp, why=why)
    if kind != "FSDP":
        for axis in ("tp", "cp"):
            if (degree := getattr(mesh, axis)) > 1:
                why = f"ranks of {axis} go with FSDP 2, which is stage 3"
                yield Refusal(setting=f"mesh.{axis}", value=degree, why=why)
    elif mesh.cp > 1 and layout.context.kind not in CONTEXT:
        why = "with FSDP 2 keys and values are gathered, or go around a ring in zigzag order"
        works = tuple({"context.kind": name} for name in CONTEXT)
        yield Refusal(setting="context.kind", value=layout.context.kind, why=why, works=works)
    if kind == "FSDP" and layout.recompute.policy == "full" and layout.recompute.every > 1:
        why = "every block is redone, or none"
        works = ({"recompute.every": 1},)
        yield Refusal(setting="recompute.every", value=layout.recompute.every, why=why, works=works)
    if mesh.ep > 1:
        yield Refusal(setting="mesh.ep", value=mesh.ep, why="experts are not shared out as such")


def advice(plan: Plan) -> Iterator[str]:
    """Yield what the user must add."""
    numbers, layout = plan.mathematics, plan.layout
    yield "Start it: accelerate launch --config_file FILE SCRIPT."
    clip = numbers.optimizer.clip_norm
    limit = "clips no norm" if clip is None else f"clips norms at {clip}"
    yield (
        f"Your script reads {layout.microbatch_sequences} sequences of {numbers.sequence_length} "
        f"on each rank, accumulates {plan.num_microbatches} times, and {limit}."
    )


SCRIPT = "your script says it"
SPEED = {
    "zero.prefetch": "one unit is gathered ahead",
    "zero.accumulate": "when gradients are reduced is its own choice",
    "zero.bucket_bytes": "the buckets are those of DDP, or of DeepSpeed",
    "zero.keep_whole_below": "every parameter is cut",
    "zero.offload_buffers": "how many buffers there are is DeepSpeed's own choice",
}
ELSEWHERE = {
    "cluster": "the launcher runs where it is started",
    "model": "your script makes the model",
    "data": SCRIPT,
    "train": SCRIPT,
    "batch": SCRIPT,
    "checkpoint": SCRIPT,
    "observe": SCRIPT,
    "optimizer": SCRIPT,
    "recompute.policy": SCRIPT,
    "recompute.every": SCRIPT,
    "experts.balance": "your model has the losses of its router",
    "experts.aux_coefficient": "your model has the losses of its router",
    "experts.aux_over": "your model has the losses of its router",
    "experts.bias_rate": "your model has the bias of its router",
    "experts.z_coefficient": "your model has the losses of its router",
}
REASONS = {
    "mesh.sequence_parallel": "norms and residuals are whole on tensor ranks",
    "mesh.dp_replicate": "what is shared out at stages 1 and 2 is shared out over all data ranks",
    "mesh.dp_shard": "what is shared out at stages 1 and 2 is shared out over all data ranks",
    "zero.unit_blocks": "a unit is a block, or all blocks",
    "zero.optimizer_offload": "FSDP offloads parameters and optimizer state together",
    "zero.parameter_offload": "FSDP offloads parameters and optimizer state together",
    "precision": "with FSDP gradients are summed in the dtype of parameters and accumulate in "
    "fp32, with DeepSpeed they accumulate in that of parameters, with DDP all is fp32",
    "precision.loss_scale": "its GradScaler starts at 65536",
    "recompute.offload": "stored inputs stay on the device, but with FSDP 2",
    "experts": "experts are the model's own matter",
}

ACCELERATE = Target(
    kind="accelerate",
    keys=keys,
    render=as_yaml,
    misfits=misfits,
    advice=advice,
    elsewhere=ELSEWHERE,
    speed=SPEED,
    reasons=REASONS,
)
