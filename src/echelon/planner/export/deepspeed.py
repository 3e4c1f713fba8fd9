"""A Plan -> a DeepSpeed JSON. DeepSpeed 0.19.

`deepspeed_numbers.py` has the tables that change numbers; `config/foreign/deepspeed.py` reads all.
Pipelines and tensor ranks are made by a script: what it must say stands in the table "echelon".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from echelon.config.entries import Entry
from echelon.config.foreign.surroundings import surroundings
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.planner.export.deepspeed_numbers import number_keys
from echelon.planner.export.forms import as_json, launch_of
from echelon.planner.export.target import Refusal, Target

ZERO = "zero_optimization"
DEVICES = {"host": "cpu", "nvme": "nvme"}
BUFFERS = {"optimizer": 4, "parameter": 1}
TABLES = {"optimizer": "offload_optimizer", "parameter": "offload_param"}
LEAST_SHARING = 2
WHOLE = 3


def keys(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a plan, and of the rest of its run."""
    mesh, numbers = plan.mesh, plan.mathematics
    found: dict[str, object] = {
        "train_batch_size": numbers.global_sequences,
        "train_micro_batch_size_per_gpu": plan.layout.microbatch_sequences,
        "gradient_accumulation_steps": plan.num_microbatches,
        "steps_per_print": settings.get("observe.log_every", 1),
    }
    if mesh.pp > 1:
        found["pipeline.stages"] = mesh.pp
    elif mesh.tp > 1:
        found["tensor_parallel.autotp_size"] = mesh.tp
    if mesh.cp > 1:
        found["sequence_parallel_size"] = mesh.cp
    if plan.model.experts is not None and mesh.ep > 1:
        found["expert_parallel.enabled"] = True
        found["expert_parallel.autoep_size"] = mesh.ep
        if plan.layout.experts.expert_tp > 1:
            pieces = plan.layout.experts.expert_tp
            found["expert_parallel.expert_tensor_parallel_size"] = pieces
    found |= number_keys(plan) | _zero_keys(plan)
    if plan.layout.recompute.offload == "host":
        found["activation_checkpointing.cpu_checkpointing"] = True
    return found


def _zero_keys(plan: Plan) -> dict[str, object]:
    zero, mesh = plan.layout.zero, plan.mesh
    found: dict[str, object] = {"stage": zero.stage}
    if zero.stage:
        found |= {"overlap_comm": True, "contiguous_gradients": True}
    size = DTYPE_BYTES[plan.mathematics.precision.gradients]
    if zero.stage < WHOLE and mesh.dp * mesh.cp > 1 and zero.bucket_bytes % size == 0:
        found["reduce_bucket_size"] = zero.bucket_bytes // size
    if zero.stage == WHOLE:
        found |= _stage_3_keys(plan)
        if mesh.dp_replicate > 1:
            found["mics_shard_size"] = mesh.dp_shard
    homes = {"optimizer": zero.optimizer_offload, "parameter": zero.parameter_offload}
    for what, home in homes.items():
        if home == "none":
            continue
        found[f"{TABLES[what]}.device"] = DEVICES[home]
        found[f"{TABLES[what]}.pin_memory"] = True
        if home == "nvme":
            found[f"{TABLES[what]}.nvme_path"] = zero.offload_dir
            found[f"{TABLES[what]}.buffer_count"] = BUFFERS[what] * zero.offload_buffers
    return {f"{ZERO}.{name}": value for name, value in found.items()}


def _stage_3_keys(plan: Plan) -> dict[str, object]:
    """Return what bounds the gathered units, counted in elements of the largest block."""
    zero = plan.layout.zero
    block, blocks = _block_elements(plan), -(-plan.model.layers // plan.mesh.pp)
    found: dict[str, object] = {
        "stage3_param_persistence_threshold": max(0, zero.keep_whole_below - 1),
    }
    units = min(zero.prefetch, blocks)
    found["stage3_prefetch_bucket_size"] = units * block
    if zero.reshard_after_forward:
        found["stage3_max_reuse_distance"] = 0
    else:
        found["stage3_max_reuse_distance"] = 2 * blocks * block
        found["stage3_max_live_parameters"] = max(blocks, units + 1) * block
    return found


def _block_elements(plan: Plan) -> int:
    """Return the elements of the largest block on a rank, as an import counts them."""
    from echelon.planner.export.settings import model_settings

    degrees = {"mesh.tp": plan.mesh.tp, "mesh.pp": plan.mesh.pp, "mesh.cp": plan.mesh.cp}
    told = {**model_settings(plan.model), **degrees}
    around = surroundings({k: Entry(value=v, source="") for k, v in told.items()}, None)
    ep = plan.mesh.ep if plan.model.experts is not None else 1
    return around.with_degrees(ep=ep, expert_tp=plan.layout.experts.expert_tp).block_elements


def misfits(plan: Plan) -> Iterator[Refusal]:
    """Yield what DeepSpeed cannot do, although it has words for the parts."""
    pipeline, zero, mesh = plan.layout.pipeline, plan.layout.zero, plan.mesh
    if mesh.pp > 1 and pipeline.schedule != "1f1b":
        why = "its pipeline runs 1f1b, with one stage on a rank"
        works = ({"pipeline.schedule": "1f1b"},)
        yield Refusal(setting="pipeline.schedule", value=pipeline.schedule, why=why, works=works)
    if mesh.pp > 1 and zero.stage >= LEAST_SHARING:
        why = "its pipelines do not share out gradients: they go with stages 0 and 1"
        works = ({"zero.stage": 1}, {"zero.stage": 0})
        yield Refusal(setting="zero.stage", value=zero.stage, why=why, works=works)
    if mesh.tp > 1 and zero.stage == WHOLE:
        why = "its tensor ranks (AutoTP) go with stages 0 to 2"
        works = ({"zero.stage": 2}, {"zero.stage": 1})
        yield Refusal(setting="zero.stage", value=zero.stage, why=why, works=works)
    context = plan.layout.context
    if mesh.cp > 1 and context.kind != "ulysses":
        why = "a sequence is cut by exchanging heads, and by nothing else"
        works = ({"context.kind": "ulysses"},)
        yield Refusal(setting="context.kind", value=context.kind, why=why, works=works)


def advice(plan: Plan) -> Iterator[str]:
    """Yield what the script and its launcher must say, as the JSON cannot."""
    nodes, per_node = launch_of(plan)
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


SPEED = {
    "zero.accumulate": "when gradients are reduced is its own choice at each stage",
    "zero.bucket_bytes": "buckets are counted in elements",
    "zero.prefetch": "what is gathered ahead is counted in elements, within one stage",
    "zero.unit_blocks": "units are modules",
    "experts.chunks": "how tokens travel is its own choice",
    "experts.dispatch": "how tokens travel is its own choice",
}
SCRIPT = "your script says it"
ELSEWHERE = {
    "cluster": "the launcher runs where it is started",
    "mesh.tp": "in a pipeline tensor ranks come from your model",
    "model": "your script makes the model",
    "data": SCRIPT,
    "train": SCRIPT,
    "batch.sequence_length": "your data loader says it",
    "batch.documents": "your data loader makes the mask",
    "checkpoint": SCRIPT,
    "observe.events": "what is written is its own choice",
    "optimizer.decay": "your script makes groups of parameters that decay or do not",
    "pipeline.stages": "partition_method of PipelineModule says it",
    "recompute.policy": SCRIPT,
    "recompute.every": SCRIPT,
    "experts.balance": "your model has the losses of its router",
    "experts.aux_coefficient": "your model has the losses of its router",
    "experts.aux_over": "your model has the losses of its router",
    "experts.bias_rate": "your model has the bias of its router",
    "experts.z_coefficient": "your model has the losses of its router",
}
REASONS = {
    "mesh.dp_replicate": "what is shared out at stages 1 and 2 is shared out over all data ranks",
    "mesh.dp_shard": "what is shared out at stages 1 and 2 is shared out over all data ranks",
    "mesh.sequence_parallel": "norms and residuals are whole on tensor ranks",
    "context.kind": "a sequence is cut by exchanging heads, and by nothing else",
    "optimizer.schedule": "after the warm-up it is constant, linear or cosine",
    "optimizer.final_ratio": "WarmupDecayLR falls to 0",
    "optimizer.decay_steps": "there is no flat part",
    "precision": "fp32, bf16 or fp16, and fp32 for the master copy",
    "experts.capacity_factor": "no token is dropped",
    "experts.drop": "no token is dropped",
    "experts.padded": "no token is dropped",
    "experts.route": "tokens go where the router sends them",
    "experts.zero_stage": "experts are shared out as all else",
    "pipeline.virtual_stages": "a rank has one stage",
    "pipeline.file": "there is no schedule of one's own",
}

DEEPSPEED = Target(
    kind="deepspeed",
    keys=keys,
    render=as_json,
    misfits=misfits,
    advice=advice,
    elsewhere=ELSEWHERE,
    speed=SPEED,
    reasons=REASONS,
)
