# SPDX-License-Identifier: Apache-2.0
"""Lints about seconds: what is computed, and messages: their size, how often, what hides them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2
from typing import Any

from echelon.config.automatic import default_tensor_overlap
from echelon.core.axis import LOSS_AXES, SHARD_AXES
from echelon.core.cluster import Link, domain_text, fast_domain
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.core.units import binary_bytes
from echelon.cost.inputs.cost_inputs import CostInputs
from echelon.cost.inputs.numbers import first_number
from echelon.cost.seconds.from_plan import cost_inputs_from_plan
from echelon.cost.seconds.step import step_seconds
from echelon.layout.data_groups import hop_degrees, secondary_degree
from echelon.layout.expert_load import rows_per_expert
from echelon.planner.lint.finding import LintMatch, lint_of
from echelon.planner.lint.memory import ROOM
from echelon.planner.predict.split_memory import memory_of_plan
from echelon.planner.search.options import MOST_STAGE

NARROW = 1024  # columns of a matrix
_FEW_TOKENS = 1024  # tokens of a microbatch
_FEW_ROWS = 64  # rows of an expert
ALIGNED = 64  # elements
_MUCH_FASTER = 2.0  # times the peak of fp32
_MANY_RANKS = 16  # ranks
_GPU_FLOPS = 10e12
"""FLOP/s from which shapes matter as they do on tensor cores."""


def _is_gpu(plan: Plan) -> bool:
    peaks = (rate for _, rate in plan.cluster.device.peak_flops)
    return max(peaks, default=0.0) >= _GPU_FLOPS


@lint_of("assumed-model", "numbers", "Touvron et al., 2023: the decoder that is assumed")
def _assumed(plan: Plan) -> LintMatch | None:
    """What is assumed of a model decides every number of its plan, and is seldom all of it so."""
    count = len(plan.model.assumed)
    if not count or plan.model.assume:
        return None
    return (
        f"{count} {'things are' if count > 1 else 'thing is'} assumed of {plan.model.name}, whose "
        "architecture is not known: it is planned, and not trained",
        "settings of [model] for what is otherwise, and model.assume = true",
    )


@lint_of(
    "fp32-on-tensor-cores", "time", "distributed, best practices (distributed-42, distributed-43)"
)
def _single(plan: Plan) -> LintMatch | None:
    """Matrix units compute 16-bit products many times as fast; model states stay 16 bytes a weight,
    activations and messages halve.
    """
    device, dtype = plan.cluster.device, plan.mathematics.precision.parameters
    wide, narrow = device.flops("fp32"), device.flops("bf16") or device.flops("fp16")
    if dtype != "fp32" or wide is None or narrow is None or narrow <= _MUCH_FASTER * wide:
        return None
    name = "bf16" if device.flops("bf16") else "fp16"
    return (
        f"parameters in fp32: {wide / 1e12:,.0f} TFLOP/s of {device.name}, {name} has "
        f"{narrow / 1e12:,.0f}",
        f"precision.parameters = {name}; gradients, sums and the master stay fp32",
    )


@lint_of("fp16-where-bf16-is", "numbers", "Kalamkar et al., 2019")
def _half(plan: Plan) -> LintMatch | None:
    """bf16 has the range of fp32, so no loss scale and no skipped steps."""
    device, dtype = plan.cluster.device, plan.mathematics.precision.parameters
    if dtype != "fp16" or device.flops("bf16") is None:
        return None
    return (
        f"fp16 ends at 65,504 and needs a loss scale; {device.name} has bf16 at the same rate",
        "precision.parameters = bf16",
    )


@lint_of("reduction-in-16-bits", "numbers", "Higham, Accuracy and Stability, 2002, section 4.2")
def _reduced(plan: Plan) -> LintMatch | None:
    """Each sum rounds to the bits of the dtype; errors grow with the ranks that add."""
    dtype, ranks = plan.mathematics.precision.reduction, plan.mesh.degree(*LOSS_AXES)
    if DTYPE_BYTES[dtype] > 2 or ranks < _MANY_RANKS:
        return None
    bits = 8 if dtype == "bf16" else 11
    return (
        f"gradients of {ranks} ranks are added in {dtype}: {ranks - 1} sums of {bits} "
        f"bits, up to {(ranks - 1) * 2.0**-bits:.2g} of the result lost",
        "precision.reduction = fp32",
    )


@lint_of("narrow-matrices", "time", "Narayanan et al., 2021, section 5.4")
def _narrow(plan: Plan) -> LintMatch | None:
    """A shard narrower than about 1024 does not fill a GPU, and still waits for its sum."""
    model, tp = plan.model, plan.mesh.tp
    width = min(model.hidden, model.ffn, model.query_dim) // tp
    if tp == 1 or width >= NARROW or not _is_gpu(plan):
        return None
    return (
        f"tp = {tp} leaves matrices {width} wide (hidden {model.hidden}): too little work for a "
        "launch and a sum",
        f"mesh.tp of at most {_widest(tp, width)}",
    )


def _widest(tp: int, width: int) -> int:
    """Return the highest degree below `tp` that leaves shards wide enough, or 1."""
    fits = (d for d in range(1, tp) if tp % d == 0 and width * tp // d >= NARROW)
    return max(fits, default=1)


@lint_of("few-tokens", "time", "Williams et al., Roofline, 2009")
def _few_tokens(plan: Plan) -> LintMatch | None:
    """A product of few rows is bound by reading weights, not by arithmetic."""
    tokens = plan.local_tokens
    if tokens >= _FEW_TOKENS or not _is_gpu(plan):
        return None
    return (
        f"a microbatch has {tokens} positions on a rank: weights are read for few rows",
        "batch.microbatch_sequences up, or mesh.cp down",
    )


@lint_of(
    "vocabulary-not-aligned",
    "time",
    "Shoeybi et al., 2019, section 3; Anthony et al., 2024, section 6",
)
def _vocabulary(plan: Plan) -> LintMatch | None:
    """Tiles of matrix units are 64 or more wide; Megatron-LM pads to 128 x tp."""
    vocab, tp = plan.model.vocab, plan.mesh.tp
    multiple = ALIGNED * tp
    if vocab % multiple == 0 or not _is_gpu(plan):
        return None
    padded = -(-vocab // multiple) * multiple
    return (
        f"vocabulary {vocab:,} % ({ALIGNED} x tp {tp}) = {vocab % multiple}: the head's matrix "
        "has ragged tiles",
        f"model.vocab = {padded:,} ({padded - vocab} ids more, never used)",
    )


@lint_of(
    "widths-not-aligned",
    "time",
    "Anthony et al., The Case for Co-Designing Model Architectures, 2024, section 6",
)
def _odd_width(plan: Plan) -> LintMatch | None:
    """Widths that are no multiple of 64 leave parts of tiles unused."""
    model, tp = plan.model, plan.mesh.tp
    widths = {"hidden": model.hidden, "ffn / tp": model.ffn // tp}
    odd = {name: width for name, width in widths.items() if width % ALIGNED}
    if not odd or not _is_gpu(plan):
        return None
    shown = ", ".join(f"{name} = {width:,}" for name, width in odd.items())
    return (
        f"{shown}: no multiple of {ALIGNED}, so tiles of matrix units are cut",
        f"widths that are multiples of {ALIGNED} x tp",
    )


@lint_of("few-rows-an-expert", "time", "DeepSeek-V3, 2024, section 3.4")
def _few_rows(plan: Plan) -> LintMatch | None:
    """A grouped product over many experts with few rows each reads weights for little."""
    if plan.model.experts is None:
        return None
    rows = rows_per_expert(plan)
    if rows >= _FEW_ROWS or not _is_gpu(plan):
        return None
    return (
        f"an expert meets {rows:.0f} rows of a microbatch: its weights are read for little",
        "larger microbatches, or mesh.ep up: rows of more ranks meet one expert",
    )


_LATENCY_SHARE = 0.5  # of the seconds of a bucket
_WORTH = 0.02  # of a step, that a change saves at least
_INT8_BLOCK = 128  # numbers
MIB = 2**20  # bytes


def _link(plan: Plan, span: int) -> Link | None:
    """Return the link that ranks use which lie on `span` consecutive ones."""
    if not plan.cluster.links:
        return None
    inside = span <= fast_domain(plan.cluster)
    return plan.cluster.links[0 if inside else -1]


@lint_of(
    "zero-3-many-microbatches", "time", "Rajbhandari et al., 2020, section 7.2.2; llm-training"
)
def _gathered_again(plan: Plan) -> LintMatch | None:
    """Stage 3 gathers parameters for forward and for backward of every microbatch: 3 psi is the
    figure of a single one.
    """
    zero, count = plan.layout.zero, plan.num_microbatches
    if zero.stage != 3 or count <= 1 or plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    passes = 2 if zero.reshard_after_forward else 1
    if passes == 1 and plan.mesh.pp == 1:
        return None
    return (
        f"{count} microbatches a step at stage 3: parameters are gathered {passes * count} times, "
        f"{passes * count} psi of all-gathers",
        "larger microbatches, or zero.stage = 2, or zero.reshard_after_forward = never",
    )


@lint_of("gradients-reduced-each-microbatch", "time", "Rajbhandari et al., 2020, section 5.2")
def _scattered_again(plan: Plan) -> LintMatch | None:
    """Gradients in slices are reduced at once, which saves memory and sends them often."""
    zero, count = plan.layout.zero, plan.num_microbatches
    if zero.stage == 0 or zero.accumulate != "slices" or count <= 1:
        return None
    if plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    return (
        f"gradients are reduced after each of {count} microbatches: {count} psi, not 1",
        "zero.accumulate = whole where memory has room for whole gradients",
    )


@lint_of("bucket-too-small", "time", "Patarasuk and Yuan, 2009; distributed, key behaviours")
def _small_bucket(plan: Plan) -> LintMatch | None:
    """Latency is paid for each message, whatever it carries: N - 1 steps of a ring, or 2 log2 N of
    a tree.
    """
    mesh, ranks = plan.mesh, plan.mesh.dp * plan.mesh.cp
    link = _link(plan, ranks * mesh.tp)
    if ranks == 1 or link is None or link.latency_s == 0:
        return None
    size = plan.layout.zero.bucket_bytes
    share = (ranks - 1) / ranks / link.bandwidth
    waited = min(ranks - 1, 2 * ceil(log2(ranks))) * link.latency_s
    if waited <= _LATENCY_SHARE * size * share:
        return None
    return (
        f"a bucket of {size / MIB:,.3g} MiB takes {size * share * 1e6:,.0f} us to move over "
        f"{ranks} ranks of {link.name}, beside {waited * 1e6:,.0f} us of latency",
        f"zero.bucket_bytes of {ceil(waited / share / _LATENCY_SHARE / MIB):,} MiB or more",
    )


@lint_of("no-prefetch", "time", "Zhao et al., PyTorch FSDP, 2023, section 3.3; scaling, table 4")
def _not_ahead(plan: Plan) -> LintMatch | None:
    """A unit that is gathered while the one before it computes is not waited for."""
    zero = plan.layout.zero
    if zero.stage != 3 or zero.prefetch > 0 or plan.mesh.degree(*SHARD_AXES) == 1:
        return None
    return ("zero.prefetch = 0: each unit is waited for before it is used", "zero.prefetch = 1")


@lint_of("no-sequence-parallel", "memory", "Korthikanti et al., 2022, section 4.2")
def _no_sequence_parallel(plan: Plan) -> LintMatch | None:
    """A reduce-scatter and an all-gather send what an all-reduce sends, and leave norms and
    residuals cut.
    """
    tp = plan.mesh.tp
    if tp == 1 or plan.layout.sequence_parallel:
        return None
    uncut_bytes = 10 * plan.local_tokens * plan.model.hidden * (tp - 1) / tp
    return (
        f"norms and residuals are whole on each of {tp} tensor ranks: about "
        f"{binary_bytes(uncut_bytes)} a block more in 16 bits, for the same bytes sent",
        "mesh.sequence_parallel = true",
    )


@lint_of("products-wait-for-rows", "time", "Wang et al., 2023, section 3")
def _products_wait(plan: Plan) -> LintMatch | None:
    """Rows that travel in chunks hide behind the product of the chunk before, where the products
    are large enough: the estimate says whether they are.
    """
    layout, tp = plan.layout, plan.mesh.tp
    if tp == 1 or not layout.sequence_parallel or layout.tp_overlap != "none":
        return None
    kind, _ = default_tensor_overlap(plan.cluster, tp)
    now = cost_inputs_from_plan(plan)
    chunked = replace(now, layout=replace(now.layout, tp_overlap=1.0))
    takes, instead = (first_number(step_seconds(work).total) for work in (now, chunked))
    if kind == "none" or instead > (1.0 - _WORTH) * takes:
        return None
    return (
        f"products over {tp} tensor ranks wait for their rows: a step of {takes:,.3g} s would take "
        f"{instead:,.3g} s in chunks, each beside a message",
        f'mesh.tp_overlap = "{kind}"',
    )


@lint_of("shards-over-nodes", "time", "Zhao et al., PyTorch FSDP, 2023, section 3.2.2")
def _shards_over_nodes(plan: Plan) -> LintMatch | None:
    """Parameters are gathered twice a microbatch, gradients of replicas added once a step."""
    mesh, node = plan.mesh, fast_domain(plan.cluster)
    inner = mesh.cp * mesh.tp
    if plan.layout.zero.stage != 3 or mesh.dp_shard * inner <= node or node % inner:
        return None
    shards = node // inner
    ep = min(plan.mesh.ep, node)
    held = memory_of_plan(plan, dp_shard=shards, dp_replicate=mesh.dp / shards, ep=ep)
    if shards < 2 or mesh.dp_shard % shards or held.total > ROOM * plan.cluster.device.memory_bytes:
        return None
    where = domain_text(plan.cluster)
    return (
        f"parameters are gathered from {mesh.dp_shard} shards over {where}; shards "
        f"over one would hold {binary_bytes(held.total)}",
        f"mesh.dp_shard = {shards}, dp_replicate = {mesh.dp // shards}: hybrid sharding",
    )


@lint_of("gathers-cross-nodes", "time", "Wang et al., ZeRO++, 2023, section 3.2")
def _gathers_cross_nodes(plan: Plan) -> LintMatch | None:
    """Parameters change once a step: all gathers of a unit but the first can stay in the nodes that
    have it, for a slice of it on each of their devices.
    """
    zero, room = plan.layout.zero, ROOM * plan.cluster.device.memory_bytes
    kept = _with_zero(plan, secondary=True)
    if zero.secondary or all(secondary_degree(kept, expert=one) == 1 for one in (False, True)):
        return None
    now = cost_inputs_from_plan(plan)
    takes, instead = _seconds(now), _seconds(cost_inputs_from_plan(kept))
    held = memory_of_plan(plan, secondary=1.0).total
    if instead > (1.0 - _WORTH) * takes or held > room:
        return None
    return (
        f"every gather crosses nodes: a step of {takes:,.3g} s would take {instead:,.3g} s with "
        f"all but the first inside of them, and hold {binary_bytes(held)}; no number changes",
        "zero.secondary = true",
    )


@lint_of("exact-over-slow-links", "time", "Wang et al., ZeRO++, 2023, sections 3.1 and 3.3")
def _exact_over_slow_links(plan: Plan) -> LintMatch | None:
    """Gathers and sums of integers of 8 bits send a quarter or half of the bytes, and round: what
    changes numbers is told, and left to whoever knows whether the training bears it.
    """
    takes = _seconds(cost_inputs_from_plan(plan))
    changes: dict[str, Plan] = {}
    if _gathers_in_int8(plan):
        numbers = plan.mathematics
        block = replace(numbers.precision, int8_block=_INT8_BLOCK)
        rounded = replace(plan, mathematics=replace(numbers, precision=block))
        changes['zero.gather = "int8"'] = _with_zero(rounded, gather="int8")
    summed = _with_zero(plan, reduce="int8")
    if plan.layout.zero.reduce == "exact" and hop_degrees(summed) != (1, 1):
        changes['zero.reduce = "int8"'] = summed
    worth = {
        name: instead
        for name, one in changes.items()
        if (instead := _seconds(cost_inputs_from_plan(one))) <= (1.0 - _WORTH) * takes
    }
    if not worth:
        return None
    shares = (
        f"{100 * (1 - instead / takes):.0f} % less with {name}" for name, instead in worth.items()
    )
    return (
        f"with rounding a step of {takes:,.3g} s would take {' and '.join(shares)}",
        f"{' or '.join(worth)}, if the training bears it: numbers change, and echelon prove says "
        "by how much",
    )


def _gathers_in_int8(plan: Plan) -> bool:
    """Return whether all matrices are gathered as they are, and have rows of whole blocks."""
    model, mesh, zero = plan.model, plan.mesh, plan.layout.zero
    stages = {zero.stage}
    if model.experts is not None:
        stages.add(plan.layout.experts.zero_stage)
    exact = zero.gather == "parameters" and not plan.mathematics.precision.is_fp8
    if stages != {MOST_STAGE} or not exact or zero.keep_whole_below or model.latent is not None:
        return False
    widths = [model.hidden, model.query_dim // mesh.tp]
    widths += [model.ffn // mesh.tp] if model.has_dense_blocks else []
    if model.experts is not None:
        widths.append(model.experts.ffn // plan.layout.experts.expert_tp)
    crosses = mesh.degree(*SHARD_AXES) * mesh.tp > fast_domain(plan.cluster)
    return crosses and all(width % _INT8_BLOCK == 0 for width in widths)


def _with_zero(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, layout=replace(plan.layout, zero=replace(plan.layout.zero, **changes)))


def _seconds(work: CostInputs) -> float:
    return first_number(step_seconds(work).total)
