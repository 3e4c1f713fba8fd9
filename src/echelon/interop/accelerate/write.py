# SPDX-License-Identifier: Apache-2.0
"""A Plan -> an Accelerate YAML: FSDP 2, the DeepSpeed plugin, or plain data parallelism.

Stage 3 is FSDP 2, with tensor and context ranks in parallelism_config; stages 1 and 2 are
DeepSpeed's; stage 0 is DDP. `read.py` reads it. Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from echelon.core.plan import Plan
from echelon.interop.accelerate.abilities import NAMES
from echelon.interop.deepspeed.abilities import OFFLOAD_DEVICES
from echelon.interop.formats import (
    ExportRefusal,
    ToolWriter,
    as_yaml,
    nodes_and_ranks_per_node,
    refusals,
    without_none,
)

MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_MESH = "parallelism_config.parallelism_config"
WHOLE = 3  # the stage that slices everything


def keys(plan: Plan, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a plan."""
    nodes, _ = nodes_and_ranks_per_node(plan)
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
    return without_none(found)


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
        "activation_checkpointing_offload": plan.layout.recompute.offload == "host" or None,
    }
    return {f"fsdp_config.fsdp_{name}": value for name, value in found.items()}


def _mesh_keys(plan: Plan) -> dict[str, object]:
    mesh = plan.mesh
    if mesh.dp_shard == mesh.world_size:
        return {}
    strategy = NAMES.context_kinds.get(plan.layout.context.kind) if mesh.cp > 1 else None
    return {
        f"{_MESH}_dp_replicate_size": mesh.dp_replicate,
        f"{_MESH}_dp_shard_size": mesh.dp_shard,
        f"{_MESH}_tp_size": mesh.tp,
        f"{_MESH}_cp_size": mesh.cp,
        f"{_MESH}_cp_comm_strategy": strategy,
    }


def _plugin_keys(plan: Plan) -> dict[str, object]:
    zero = plan.layout.zero
    files = zero.optimizer_offload == "nvme"
    found: dict[str, object] = {
        "zero_stage": zero.stage,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": plan.mathematics.optimizer.clip_norm or 0.0,
        "offload_optimizer_device": OFFLOAD_DEVICES[zero.optimizer_offload],
        "offload_param_device": "none",
        "offload_optimizer_nvme_path": zero.offload_dir if files else None,
    }
    return {f"deepspeed_config.{name}": value for name, value in found.items()}


def unsupported(plan: Plan) -> Iterator[ExportRefusal]:
    """Return what Accelerate cannot do, although it has words for the parts."""
    mesh, layout, whole = plan.mesh, plan.layout, kind_of(plan) == "FSDP"
    context, recompute = layout.context.kind, layout.recompute
    other_cut = whole and mesh.cp > 1 and context not in NAMES.context_kinds
    gather_or_ring = "with FSDP 2 keys and values are gathered, or go around a ring in zigzag order"
    with_fsdp = "ranks of {} go with FSDP 2, which is stage 3"
    skips_blocks = whole and recompute.policy == "full" and recompute.every > 1
    return refusals(
        (mesh.pp > 1, "mesh.pp", mesh.pp, "there is no pipeline for training", ()),
        *(
            (degree > 1 and not whole, f"mesh.{axis}", degree, with_fsdp.format(axis), ())
            for axis, degree in (("tp", mesh.tp), ("cp", mesh.cp))
        ),
        (other_cut, "context.kind", context, gather_or_ring, sorted(NAMES.context_kinds)),
        (skips_blocks, "recompute.every", recompute.every, "every block is redone, or none", (1,)),
        (mesh.ep > 1, "mesh.ep", mesh.ep, "experts are not shared out as such", ()),
    )


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


WRITER = ToolWriter(keys=keys, render=as_yaml, unsupported=unsupported, advice=advice)
