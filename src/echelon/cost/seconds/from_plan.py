# SPDX-License-Identifier: Apache-2.0
"""A Plan, and the Cluster that it runs on, as the numbers that the formulas read.

Where adapters alone are trained (`core/choices/lora.py`), their sizes are among the numbers.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from echelon.core.choices.collective_algorithms import algorithm_index
from echelon.core.choices.lora import LINEAR_GROUPS
from echelon.core.choices.optimizers import OPTIMIZERS, PLAIN_OPTIMIZER
from echelon.core.cluster import Cluster, Efficiency, Link, cluster_under_load, shared_bandwidth
from echelon.core.model_shape import ModelShape, of_layer_kind
from echelon.core.parameters import is_adapter, num_parameters, num_trained_parameters, parameters
from echelon.core.plan import DTYPE_BYTES, OptimizerKind, Plan, Precision, ReduceKind
from echelon.cost.activations.numbers import adapter_rows
from echelon.cost.bytes.expert_memory import balanced_memory
from echelon.cost.bytes.local_sgd import sent_element_bytes
from echelon.cost.bytes.quantised import (
    CODE_BYTES,
    REDUCE_BLOCK,
    largest_number_bytes,
    message_bytes,
    scale_bytes,
)
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import (
    LayoutNumbers,
    MachineNumbers,
    ModelNumbers,
    Num,
    TierNumbers,
    ceil_div,
)
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.seconds.kernels import attention_width, product_dtype, with_measured_kernels
from echelon.cost.seconds.trainers import our_constants
from echelon.layout.expert_load import dispatched_tokens


def cost_inputs_from_plan(plan: Plan, software: TrainerConstants | None = None) -> CostInputs:
    """Return what the formulas read of a plan.

    `software` says what the plan leaves open, by default our own trainer; dtypes and optimizer are
    those of the plan.
    """
    facts = software or our_constants(plan.cluster, plan.layout.kernels)
    return CostInputs(
        model=adapted_model_numbers(
            plan.model, plan.mathematics.sequence_length, tp=float(plan.mesh.tp)
        ),
        machine=machine_numbers_from_plan(plan, measured=bool(facts.gpu_kernels)),
        software=constants_for_precision(
            facts, plan.mathematics.precision, plan.mathematics.optimizer.kind
        ),
        layout=layout_numbers_from_plan(plan),
    )


def machine_numbers_from_plan(plan: Plan, *, measured: bool) -> MachineNumbers:
    """Return the rates of the devices of a plan; `measured`: those that our kernels reach."""
    precision = plan.mathematics.precision
    dtype = product_dtype(plan.cluster, precision)
    ranks = plan.mesh.num_workers
    machine = machine_numbers_from_cluster(
        plan.cluster, dtype, attention_dtype=precision.parameters, ranks=ranks
    )
    return with_measured_kernels(machine, plan, dtype=dtype, ranks=ranks) if measured else machine


_SHARED_STREAMS = {"sequential": 0.0, "parallel": 1.0, "parallel-one-norm": 2.0}
"""Of attention and MLP: the stream, and its norm."""


def model_numbers_from_shape(shape: ModelShape, length: int, *, tp: Num = 1.0) -> ModelNumbers:
    """Return the numbers of a model that reads sequences of `length` tokens.

    The vocabulary is that which `tp` tensor ranks pad it to, an array where `tp` is one.
    """
    latent, experts = shape.latent, shape.experts
    normed_together = shape.qk_norm_over == "width"
    return ModelNumbers(
        layers=float(shape.layers),
        hidden=float(shape.hidden),
        heads=float(shape.heads),
        query_dim=float(shape.query_dim),
        kv_dim=float(shape.kv_dim),
        attention_dim=float(attention_width(shape)),
        ffn=float(shape.ffn),
        up=2.0 if shape.gated else 1.0,
        vocab=ceil_div(float(shape.vocab), tp) * tp,
        tied=float(shape.tied),
        positions=float(shape.max_positions) if shape.positions == "learned" else 0.0,
        length=float(length),
        keys_per_query=mean_keys_per_query(shape, length),
        norm_weights=2.0 if shape.norm == "layernorm" else 1.0,
        block_norms=float(len(shape.norms)),
        extra_streams=2.0 * (shape.norm_place == "both") - _SHARED_STREAMS[shape.residual],
        qkv_bias=attention_vectors(shape),
        output_bias=float(shape.output_bias),
        mlp_bias=float(shape.mlp_bias),
        norms_before=float(shape.norm_place != "after"),
        head_norms=2.0 * shape.head_dim * (shape.qk_norm and not normed_together),
        width_norms=float(shape.query_dim + shape.kv_dim) * (shape.qk_norm and normed_together),
        query_rank=float(latent.query_rank) if latent and latent.query_rank else 0.0,
        kv_rank=float(latent.kv_rank + latent.rope_dim) if latent else 0.0,
        rope_dim=float(latent.rope_dim) if latent else 0.0,
        kv_up_dim=float(shape.heads * (latent.nope_dim + latent.value_dim)) if latent else 0.0,
        value_dim=float(shape.heads * latent.value_dim) if latent else 0.0,
        experts=float(experts.num_experts) if experts else 0.0,
        top_k=float(experts.top_k) if experts else 0.0,
        expert_ffn=float(experts.ffn) if experts else 0.0,
        shared_experts=float(experts.shared_experts) if experts else 0.0,
        expert_bias=float(experts.bias) if experts else 0.0,
        logit_bias=float(experts.logit_bias) if experts else 0.0,
        dense_layers=float(experts.first_dense_layers) if experts else 0.0,
    )


def attention_vectors(shape: ModelShape) -> float:
    """Return the numbers of biases and sinks of attention over the width of what biases are of."""
    sinks = shape.heads / (shape.query_dim + 2 * shape.kv_dim) if shape.sinks else 0.0
    return float(shape.qkv_bias) + sinks


def mean_keys_per_query(shape: ModelShape, length: int) -> float:
    """Return the mean number of keys that a query meets; its own counts half under a causal mask.

    So a causal mask hides exactly half of a sequence. Of blocks of several kinds it is the mean.
    """
    kinds = [shape.layer_kind(layer) for layer in range(shape.layers)]
    pairs = sum(
        kinds.count(kind) * of_layer_kind(shape, kind).mask.num_pairs(length) for kind in set(kinds)
    )
    return (pairs / shape.layers - shape.causal * length / 2) / length


def layout_numbers_from_plan(plan: Plan) -> LayoutNumbers:
    """Return the numbers of the split of a plan."""
    layout, mesh, layers = plan.layout, plan.mesh, plan.model.layers
    pipeline, context, zero = layout.pipeline, layout.context, layout.zero
    again = sum(map(layout.recompute.recomputes, range(layers)))
    local = plan.mathematics.local_sgd
    return LayoutNumbers(
        tp=float(mesh.tp),
        cp=float(mesh.cp),
        pp=float(mesh.pp),
        dp_shard=float(mesh.dp_shard),
        dp_replicate=float(mesh.dp_replicate),
        ep=float(mesh.ep),
        expert_tp=float(layout.experts.expert_tp),
        two_hop=float(layout.experts.dispatch == "two-hop"),
        chunks=float(layout.experts.chunks),
        padding=_padding(plan),
        sequence_parallel=float(layout.sequence_parallel),
        tp_overlap=float(layout.tp_overlap != "none"),
        ulysses=float(context.ulysses_degree),
        gathered=float(context.record.gathers_keys),
        microbatch=float(layout.microbatch_sequences),
        microbatches=float(plan.num_microbatches),
        virtual=max(1.0, len(pipeline.stages) / mesh.pp),
        schedule=schedule_index(pipeline.schedule),
        zero=float(zero.stage),
        reshard=float(zero.reshard_after_forward),
        recompute=again / layers,
        selective=float("attention" in layout.recompute.operators),
        **{
            f"redone_{name}": float(name in layout.recompute.operators)
            for name in ("norm", "activation", "mlp")
        },
        offload=float(zero.optimizer_offload != "none"),
        gathered_bytes=_coded_bytes(plan),
        gathers_ends=float(zero.gather == "int8"),
        parameter_offload=float(zero.parameter_offload != "none"),
        secondary=float(zero.secondary),
        summed_bytes=summed_weight_bytes(zero.reduce, plan.mathematics.precision),
        sums=float(algorithm_index(layout.collectives.algorithm)),
        servers=float(mesh.servers),
        round_steps=float(local.every),
        fragments=float(local.fragments),
        delay=float(local.delay),
        outer_bytes=float(sent_element_bytes(plan)) if local.active else 0.0,
        outer_gathers=float(local.quantised),
    )


def _coded_bytes(plan: Plan) -> float:
    """Return the bytes of a weight of a block as it is gathered, 0 where as it is."""
    precision = plan.mathematics.precision
    if plan.layout.zero.gather == "parameters":
        return 0.0
    return gathered_weight_bytes(precision, int8_block=precision.int8_block)


def gathered_weight_bytes(precision: Precision, *, int8_block: int) -> float:
    """Return the bytes of a weight of a block that is gathered as a code.

    `int8_block` weights share a scale; 0 where codes are those of products in fp8.
    """
    scale = largest_number_bytes(precision) / int8_block if int8_block else 0.0
    return CODE_BYTES + scale


def summed_weight_bytes(kind: ReduceKind, precision: Precision) -> float:
    """Return the bytes of a gradient as codes of it are summed; 0 where it is summed as it is."""
    if kind == "exact":
        return 0.0
    return message_bytes(REDUCE_BLOCK, kind, scale_bytes(precision)) / REDUCE_BLOCK


def _padding(plan: Plan) -> float:
    """Return how many rows meet the experts of a rank for each that is routed to them."""
    experts = plan.model.experts
    if experts is None or not plan.layout.experts.padded:
        return 1.0
    return balanced_memory(plan).rows_here / (dispatched_tokens(plan) * experts.top_k)


def constants_for_precision(
    software: TrainerConstants, precision: Precision, optimizer: OptimizerKind = PLAIN_OPTIMIZER
) -> TrainerConstants:
    """Return `software` with the bytes that the dtypes and the optimizer of a run take.

    An update reads gradient and states, and writes states and the parameter; where no state is a
    copy of it, it reads the parameter, too. Before it gradients are read for their norm. As kernels
    of their own, casts read one dtype and write the other.
    """
    master = DTYPE_BYTES[precision.master]
    element, gradient = DTYPE_BYTES[precision.parameters], DTYPE_BYTES[precision.gradients]
    states = num_states(optimizer) * master
    # Where the parameters that rest are what the optimizer updates, there is no other copy.
    rests = np.asarray(software.parameter_bytes) > 0.0
    beside = master * precision.has_master * (1.0 - rests)
    return replace(
        software,
        element_bytes=float(DTYPE_BYTES[precision.parameters]),
        gradient_bytes=float(DTYPE_BYTES[precision.gradients]),
        reduced_bytes=float(DTYPE_BYTES[precision.reduction]),
        state_bytes=float(states + beside),
        parameter_bytes=float(master * rests),
        update_traffic=float(
            2 * (states + master * precision.has_master)
            + gradient
            + element * (1 if precision.has_master else 2)
        ),
        norm_traffic=float(gradient),
        cast_traffic=float((gradient + master) * precision.has_master),
        copy_traffic=float((master + element) * precision.has_master),
        copies_in_fp8=float(precision.is_fp8),
        wide_weight_gradients=float(precision.is_fp8 and not precision.has_tensor_scales),
        # The kernel of tiles multiplies e4m3 by e4m3.
        wide_input_gradients=float(
            precision.is_fp8
            and not precision.has_tensor_scales
            and precision.fp8_gradients != "e4m3"
        ),
    )


def num_states(optimizer: OptimizerKind) -> int:
    """Return how many tensors an optimizer keeps of each parameter."""
    return len(OPTIMIZERS[optimizer].state)


NOMINAL_FLOPS_PER_BYTE = 10.0
"""FLOP/s of a device whose peak is not known, for each byte/s of its memory: a core or a few."""

NO_LINK = Link(name="none", degree=1, bandwidth=1e12, latency_s=0.0)
"""The tier of a single device, which talks to nobody."""


def machine_numbers_from_cluster(
    cluster: Cluster,
    dtype: str = "bf16",
    *,
    attention_dtype: str | None = None,
    ranks: int | None = None,
) -> MachineNumbers:
    """Return the numbers of a cluster whose devices compute in `dtype`, each with its share.

    Attention may be done in another one: in "bf16" where products are in "fp8". Where a peak is
    not known, it is a nominal rate for each byte of the memory's bandwidth. Where devices share
    cores, `ranks` of a node compute at once, by default on all of its devices; where they share the
    interfaces of a node, all of them send at once.
    """
    computing = min(ranks or cluster.devices_per_node, cluster.devices_per_node)
    share = cluster.device.share(computing)
    cluster = cluster_under_load(cluster, computing)
    device = cluster.device
    how_near: dict[str, Any] = {
        item.name: float(getattr(device.efficiency, item.name))
        for item in fields(Efficiency)
        if item.name in _FIELDS
    }
    return MachineNumbers(
        peak_flops=peak_flops(cluster, dtype),
        attention_flops=peak_flops(cluster, attention_dtype or dtype),
        memory_bytes=float(device.memory_bytes),
        memory_bandwidth=float(device.memory_bandwidth),
        host_bandwidth=float(device.host_bandwidth),
        node=float(cluster.devices_per_node),
        tiers=tuple(_tier(cluster, link) for link in cluster.links or (NO_LINK,)),
        share=share,
        **how_near,
    )


_FIELDS = frozenset(item.name for item in fields(MachineNumbers))


def peak_flops(cluster: Cluster, dtype: str) -> float:
    """Return the dense peak of a device of `cluster` in FLOP/s, nominal where it is not known."""
    device = cluster.device
    return device.flops(dtype) or NOMINAL_FLOPS_PER_BYTE * device.memory_bandwidth


def _tier(cluster: Cluster, link: Link) -> TierNumbers:
    return TierNumbers(
        degree=float(link.degree),
        bandwidth=float(shared_bandwidth(cluster, link)),
        latency_s=float(link.latency_s),
        efficiency=float(link.efficiency),
        half_bytes=float(link.half_bytes),
    )


def adapted_model_numbers(shape: ModelShape, length: int, *, tp: Num = 1.0) -> ModelNumbers:
    """Return the numbers of a shape, and of its adapters where it has some."""
    return with_adapters(model_numbers_from_shape(shape, length, tp=tp), shape)


def with_adapters(numbers: ModelNumbers, shape: ModelShape) -> ModelNumbers:
    """Return the numbers of a shape with those of its adapters; as they are, where it has none."""
    if shape.lora is None:
        return numbers
    own = [spec for spec in parameters(shape) if spec.layer == 0 and is_adapter(spec.name)]
    split = sum(spec.numel for spec in own if spec.split_dim is not None)
    rows = adapter_rows(shape)
    # What both branches read through one norm is there once anyway, unless both keep it.
    once = shape.residual == "parallel-one-norm" and not (rows[0] and rows[2])
    return replace(
        numbers,
        frozen=1.0,
        extra_streams=numbers.extra_streams + once,
        trained=num_trained_parameters(shape) / num_parameters(shape),
        adapters_attention_in=float(rows[0] + sum(rows[len(LINEAR_GROUPS) :])),
        adapters_attention_out=float(rows[1]),
        adapters_mlp_in=float(rows[2]),
        adapters_mlp_out=float(rows[3]),
        adapters_whole=float(sum(spec.numel for spec in own) - split),
        adapters_split=float(split),
    )
