"""A Plan -> a command of Megatron-LM: a shell script with its flags. Megatron-LM core 0.16.

`megatron_model.py` has the flags of the model and its experts, `megatron_numbers.py` those that
change numbers; `config/foreign/megatron.py` reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.balance import split_layers
from echelon.planner.export.forms import as_command, launch_of
from echelon.planner.export.megatron_model import model_flags, model_misfits
from echelon.planner.export.megatron_numbers import number_flags
from echelon.planner.export.target import Refusal, Target

LAUNCHER = ("--nnodes", "--nproc-per-node")
CONTEXT = {
    "ring": "p2p",
    "gathered": "all_gather",
    "ulysses": "a2a",
    "ulysses-ring": "a2a+p2p",
}
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
SCHEDULES = ("1f1b", "interleaved-1f1b")


def keys(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the flags of a plan, and of the rest of its run."""
    nodes, per_node = launch_of(plan)
    flags: dict[str, object] = {"--nnodes": nodes, "--nproc-per-node": per_node}
    flags |= _mesh_flags(plan) | _pipeline_flags(plan) | _zero_flags(plan)
    flags |= model_flags(plan) | _recompute_flags(plan) | number_flags(plan)
    return flags | _run_flags(plan, settings)


def _mesh_flags(plan: Plan) -> dict[str, object]:
    mesh, context = plan.mesh, plan.layout.context
    flags: dict[str, object] = {
        "--tensor-model-parallel-size": mesh.tp,
        "--pipeline-model-parallel-size": mesh.pp,
        "--context-parallel-size": mesh.cp,
    }
    if plan.layout.sequence_parallel:
        flags["--sequence-parallel"] = True
    if mesh.cp > 1 and context.kind in CONTEXT:
        flags["--cp-comm-type"] = CONTEXT[context.kind]
        if context.kind == "ulysses-ring":
            ring = mesh.cp // context.ulysses_degree
            flags["--hierarchical-context-parallel-sizes"] = [context.ulysses_degree, ring]
    return flags


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
    flags: dict[str, object] = {}
    if zero.stage == 1:
        flags["--use-distributed-optimizer"] = True
    elif zero.stage == 3 and not zero.reshard_after_forward and mesh.pp == 1:
        flags |= {"--use-torch-fsdp2": True, "--torch-fsdp2-no-reshard-after-forward": True}
    elif zero.stage > 1:
        flags |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": STRATEGIES[zero.stage],
            "--use-distributed-optimizer": True,
            "--ckpt-format": "fsdp_dtensor",
        }
    if zero.stage and mesh.dp_replicate > 1:
        flags["--num-distributed-optimizer-instances"] = mesh.dp_replicate
    if zero.optimizer_offload == "host":
        flags |= {"--optimizer-cpu-offload": True, "--optimizer-offload-fraction": 1.0}
    if mesh.dp * mesh.cp > 1 and zero.stage < 3 and plan.mathematics.optimizer.kind != "muon":
        flags["--overlap-grad-reduce"] = True
        size = DTYPE_BYTES[plan.mathematics.precision.gradients]
        if zero.bucket_bytes % size == 0:
            flags["--ddp-bucket-size"] = zero.bucket_bytes // size
    if zero.stage == 1:
        flags["--overlap-param-gather"] = True
    return flags


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
    """Return the flags of a run around its plan: what is said, saved, validated and read."""
    flags: dict[str, object] = {"--log-interval": settings.get("observe.log_every", 1)}
    if plan.mathematics.seed:
        flags["--seed"] = plan.mathematics.seed
    if (every := settings.get("checkpoint.every")) is not None:
        flags |= {"--save": "checkpoints", "--save-interval": every}
    if (every := settings.get("train.validate_every")) is not None:
        flags["--eval-interval"] = every
        flags["--eval-iters"] = settings.get("train.validation_batches", 8)
    else:
        flags["--eval-iters"] = 0
    return flags | {"--mock-data": True}


def misfits(plan: Plan) -> Iterator[Refusal]:
    """Yield what Megatron-LM cannot do, although it has words for the parts."""
    pipeline, zero, recompute = plan.layout.pipeline, plan.layout.zero, plan.layout.recompute
    if plan.mesh.pp > 1 and pipeline.schedule not in SCHEDULES:
        why = "pipelines are 1f1b, or interleaved-1f1b with several stages on a rank"
        works = tuple({"pipeline.schedule": name} for name in SCHEDULES)
        yield Refusal(setting="pipeline.schedule", value=pipeline.schedule, why=why, works=works)
    elif plan.mesh.pp > 1 and (pipeline.virtual_stages > 1) != (
        pipeline.schedule == "interleaved-1f1b"
    ):
        why = "a rank with several stages interleaves them, one with one does not"
        yield Refusal(setting="pipeline.schedule", value=pipeline.schedule, why=why)
    if zero.stage == 3 and not zero.reshard_after_forward and plan.mesh.pp > 1:
        why = "only torch's FSDP 2 keeps parameters whole there, and it has no pipeline"
        works = ({"zero.reshard_after_forward": "always"},)
        yield Refusal(setting="zero.reshard_after_forward", value="never", why=why, works=works)
    if plan.mathematics.optimizer.kind == "muon" and zero.stage:
        why = "its Muon goes with whole optimizer state on every data rank: stage 0"
        works = ({"optimizer.kind": "adamw"},)
        yield Refusal(setting="optimizer.kind", value="muon", why=why, works=works)
    if recompute.policy == "full" and recompute.every > 1:
        why = "it redoes every block, or the first ones of each stage"
        works = ({"recompute.every": 1},)
        yield Refusal(setting="recompute.every", value=recompute.every, why=why, works=works)
    yield from model_misfits(plan)


def render(
    flags: Mapping[str, object], heads: Sequence[str], recorded: Mapping[str, object]
) -> str:
    """Return flags as a shell script."""
    return as_command(flags, heads, recorded, launcher=LAUNCHER, script="pretrain_gpt.py")


def advice(plan: Plan) -> Iterator[str]:
    """Yield what the user must add."""
    nodes, _ = launch_of(plan)
    yield "Your data and tokenizer stand instead of --mock-data: --data-path, --tokenizer-type."
    if nodes > 1:
        yield "On each node torchrun needs --node-rank, --master-addr and --master-port as well."
    if plan.mathematics.seed == 0:
        yield "Megatron-LM takes seeds from 1 on: its own default stands for train.seed = 0."


SPEED = {
    "zero.accumulate": "when gradients are reduced is Megatron-LM's own choice at each stage",
    "zero.bucket_bytes": "buckets are counted in elements",
    "zero.prefetch": "what is gathered ahead is its own choice",
    "zero.unit_blocks": "a unit is a block",
    "experts.chunks": "tokens travel at once",
    "experts.dispatch": "--moe-token-dispatcher-type has no two hops by nodes",
}
ELSEWHERE = {
    "cluster": "the launcher runs where it is started",
    "data": "--data-path and --tokenizer-type say it",
    "train.run_name": "--save names a folder",
    "train.runs_dir": "--save names a folder",
    "train.weights": "--load takes checkpoints of its own form",
    "train.validation_batches": "--eval-iters says it",
    "train.step_timeout_s": "--distributed-timeout-minutes is of one collective",
    "checkpoint.keep": "all checkpoints stay",
    "observe": "what is logged is its own choice",
    "model.name": "a name is for people",
}
REASONS = {
    "context.kind": "keys and values go around a ring in zigzag order, are gathered, or heads are "
    "exchanged",
    "model.soft_cap": "scores are not capped",
    "model.causal": "a query meets the keys before it",
    "model.initial_std": "one deviation for all matrices",
    "optimizer.decay": "weight decay is that of all matrices",
    "precision": "fp32, bf16 or fp16, with gradients that are summed as they accumulate, and "
    "fp32 for the master copy",
    "recompute.offload": "stored inputs stay on the device",
    "zero.parameter_offload": "slices of parameters stay on the device",
    "zero.optimizer_offload": "optimizer state rests on the device or on the host",
    "zero.offload_dir": "nothing rests in files",
    "zero.offload_buffers": "nothing rests in files",
    "zero.keep_whole_below": "every parameter is cut",
    "experts.route": "tokens go where the router sends them",
    "experts.zero_stage": "experts are shared out as all else",
    "pipeline.file": "there is no schedule of one's own",
}

MEGATRON = Target(
    kind="megatron",
    keys=keys,
    render=render,
    misfits=misfits,
    advice=advice,
    elsewhere=ELSEWHERE,
    speed=SPEED,
    reasons=REASONS,
    says_model=True,
)
