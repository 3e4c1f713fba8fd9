# SPDX-License-Identifier: Apache-2.0
"""A Plan -> a command of Megatron-LM: a shell script with its flags. Megatron-LM core 0.16.

`write_model.py` has the flags of the model and its experts; `read.py` reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from echelon.core.choices.optimizers import OPTIMIZERS, PLAIN_OPTIMIZER
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.seconds.stages import split_layers
from echelon.interop.formats import as_command, nodes_and_ranks_per_node, without_none
from echelon.interop.megatron.abilities import NAMES
from echelon.interop.megatron.write_model import model_flags, number_flags, unsupported_by_model
from echelon.interop.tool_writer import ExportRefusal, ToolWriter, refusals
from echelon.schedule.build import SCHEDULES

LAUNCHER = ("--nnodes", "--nproc-per-node")
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


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
