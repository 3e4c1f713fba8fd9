# SPDX-License-Identifier: Apache-2.0
"""Values of dtypes, ZeRO, recompute, overlap and step lines that are "auto" or not set, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import ceil, log2
from typing import cast

from echelon.config.model.settings import build_model
from echelon.config.view import View, mesh_of, record
from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.cluster import Cluster, fast_domain
from echelon.core.mesh import Mesh
from echelon.core.parameters import num_parameters
from echelon.core.plan import (
    DTYPE_BYTES,
    Accumulation,
    DType,
    Fp8Format,
    Plan,
    Recompute,
    RecomputedOperator,
    TensorOverlapKind,
    Zero,
)
from echelon.core.units import binary_bytes
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.cost.bytes.nccl import joins_by_nvlink
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part

NO_FOLDER = "none"

MIB = 2**20  # bytes
MODULE_BUCKET_BYTES = 25 * MIB
"""Bytes of a bucket of PyTorch's DistributedDataParallel (`bucket_cap_mb`)."""
BUCKET_LATENCY_SHARE = 0.1
"""Share of a bucket's seconds on its link that may be latency."""
FEWEST_BUCKETS = 16
"""Buckets at least, so that at most so small a part of all gradients is summed after backward."""
MOST_LINES = 200
"""Step lines of a run, where nobody says how many: a log that is still read."""


def default_log_every(steps: int) -> tuple[int, str]:
    """Return the steps between step lines, 1, 2 or 5 times a power of ten, and why."""
    every = next(
        factor * 10**power
        for power in count()
        for factor in (1, 2, 5)
        if steps <= MOST_LINES * factor * 10**power
    )
    return every, f"derived: {MOST_LINES} lines at most in {steps} steps"


def default_precision(view: View, cluster: Cluster) -> tuple[dict[str, object], str]:
    """Return the dtypes of a run that sets none, and why: bf16 where devices have it.

    Gradients, their sums and the master stay fp32 (Micikevicius et al., Mixed precision training,
    2018). fp16 needs a loss scale, which parameter servers do not share.
    """
    device, said = cluster.device, (*view.entries, *view.wrong)
    if any(key.startswith("precision.") for key in said):
        return {}, ""
    if device.flops("bf16") is not None:
        return {"precision.parameters": "bf16"}, "parameters in bf16, the rest in fp32"
    if device.flops("fp16") is not None and "servers.count" not in said:
        half: dict[str, object] = {"precision.parameters": "fp16"}
        half["precision.loss_scaling"] = "dynamic"
        return half, f"parameters in fp16 ({device.name} has no bf16), the rest in fp32"
    return {}, "everything in fp32"


def default_accumulation(stage: int) -> tuple[Accumulation, str]:
    """Return how gradients of microbatches add up, and why.

    Whole gradients are sent once a step; slices take 1/N of the memory and are sent after every
    microbatch, which is what stages 2 and 3 are for.
    """
    if stage < 2:
        return "whole", f"derived: stage {stage} holds whole gradients, sent once per step"
    return "slices", f"derived: stage {stage} holds slices of gradients, sent per microbatch"


def default_bucket_bytes(
    mesh: Mesh, cluster: Cluster, *, stage: int, gradient_bytes: int
) -> tuple[int, str]:
    """Return the bytes of gradients that are reduced together, and why.

    A sum over n ranks costs 2 (n - 1) latencies and moves 2 (n - 1) / n of its bytes in a ring
    (Patarasuk and Yuan, 2009); a tree waits for 2 log2 n instead of n - 1. So what a bucket must
    hold for its latency to be a small share of its seconds grows with n: Megatron-Core has
    max(4e7, 1e6 x n) elements for it (its DistributedDataParallel). But the sum of the last bucket
    hides behind no backward, so that a bucket is never more than a small share of all gradients.
    """
    usual, ranks = MODULE_BUCKET_BYTES, mesh.degree(*LOSS_AXES)
    span = ranks * mesh.tp
    if ranks == 1 or stage == 3 or cluster.backend == "gloo" or not cluster.links:
        return usual, f"derived: {binary_bytes(usual)}, as PyTorch's data parallelism has"
    link = cluster.links[0 if span <= fast_domain(cluster) else -1]
    waited = min(ranks - 1, 2 * ceil(log2(ranks))) * link.latency_s
    enough = ceil(waited / BUCKET_LATENCY_SHARE * ranks / (ranks - 1) * link.bandwidth / MIB) * MIB
    most = gradient_bytes // (mesh.tp * mesh.pp * FEWEST_BUCKETS) // MIB * MIB
    found = max(usual, min(enough, most))
    return found, f"derived: over {ranks} data ranks of {link.name}, so that latency is a tenth"


def read_tensor_overlap(
    view: View, cluster: Cluster
) -> tuple[TensorOverlapKind, dict[str, tuple[object, str]]]:
    """Return how products over tensor ranks overlap, and why where it was left to us."""
    word = view.word("mesh.tp_overlap")
    if word != "auto":
        return cast(TensorOverlapKind, word), {}
    found, source = default_tensor_overlap(cluster, view.integer("mesh.tp"))
    return found, {"mesh.tp_overlap": (found, source)}


def default_tensor_overlap(cluster: Cluster, tp: int) -> tuple[TensorOverlapKind, str]:
    """Return how products over `tp` neighbours overlap on a cluster, and why.

    A CPU that carries messages within a machine takes the time for it from the products, so that
    nothing would be hidden.
    """
    domain = fast_domain(cluster)
    inside = domain % tp == 0
    if cluster.backend != "nccl":
        if inside:
            return "none", "derived: ranks of one machine take the time of messages from products"
        return "ring", f"derived: {tp} tensor ranks are on several machines"
    if inside and joins_by_nvlink(cluster):
        return "symmetric-memory", f"derived: NVLink joins the {tp} tensor ranks"
    return "ring", f"derived: messages join the {tp} tensor ranks, not NVLink"


def read_recompute(view: View) -> tuple[Recompute, dict[str, tuple[object, str]]]:
    """Return what is recomputed, and where operators come from that nobody has set."""
    operators, derived = view.value("recompute.operators"), dict[str, tuple[object, str]]()
    if operators == "auto" and view.word("recompute.policy") == "selective":
        operators = cheap_operators(view)
        derived["recompute.operators"] = list(operators), "derived: what takes next to no time"
    elif operators == "auto":
        operators = ()
    found = record(
        view,
        Recompute,
        "recompute",
        operators=tuple(cast("Sequence[RecomputedOperator]", operators)),
    )
    return found, derived


def cheap_operators(view: View) -> tuple[RecomputedOperator, ...]:
    """Return the operators that take next to no time, of a model with or without a dense MLP."""
    return ("norm", "activation") if build_model(view).has_dense_blocks else ("norm",)


def read_fp8_gradients(view: View) -> tuple[Fp8Format, dict[str, tuple[object, str]]]:
    """Return the format of gradients in 8 bits, and its source where it was left to us."""
    word = view.word("precision.fp8_gradients")
    if word != "auto":
        return cast(Fp8Format, word), {}
    if view.word("precision.matmul") != "fp8":
        return "e4m3", {}  # Nothing has it, and nothing is said of it.
    found: Fp8Format = "e4m3"
    source = "derived: a tile has few numbers, and needs few bits of exponent"
    if view.word("precision.fp8_scales") == "tensor":
        found = "e5m2"
        source = "derived: gradients of a whole tensor differ by more than e4m3 has room for"
    return found, {"precision.fp8_gradients": (found, source)}


def read_zero(view: View, cluster: Cluster) -> tuple[Zero, dict[str, tuple[object, str]]]:
    """Return ZeRO's settings, and value and source of those that were left to us.

    `reshard_after_forward` of "auto" is provisionally true: see `default_resharding`.
    """
    stage, folder = view.integer("zero.stage"), view.word("zero.offload_dir")
    accumulate, derived = view.word("zero.accumulate"), dict[str, tuple[object, str]]()
    bucket_bytes = view.value("zero.bucket_bytes")
    if bucket_bytes == "auto":
        weights = num_parameters(build_model(view))
        size = DTYPE_BYTES[cast(DType, view.word("precision.gradients"))]
        bucket_bytes, source = default_bucket_bytes(
            mesh_of(view), cluster, stage=stage, gradient_bytes=weights * size
        )
        derived["zero.bucket_bytes"] = bucket_bytes, source
    if accumulate == "auto":
        accumulate, source = default_accumulation(stage)
        derived["zero.accumulate"] = accumulate, source
    zero = record(
        view,
        Zero,
        "zero",
        accumulate=accumulate,
        bucket_bytes=bucket_bytes,
        reshard_after_forward=view.word("zero.reshard_after_forward") != "never",
        offload_dir="" if folder == NO_FOLDER else folder,
    )
    return zero, derived


def default_resharding(plan: Plan) -> tuple[bool, str]:
    """Return whether a plan of stage 3 frees units after their forward, and why.

    Without a pipeline backward follows forward: what is kept is all that stage 3 saves. A stage of
    a pipeline runs several microbatches, and would gather all its units twice for each of them;
    it keeps them through the step where that leaves half of the device to activations.
    """
    if plan.layout.zero.secondary:
        return True, "derived: secondary slices are for units that are gathered again"
    if plan.mesh.pp == 1:
        return True, "derived: there is no pipeline, and backward follows forward"
    if plan.num_microbatches == 1:
        return True, "derived: there is one microbatch"
    whole = max(_state_with_whole_parameters(plan, place) for place in range(plan.mesh.pp))
    half = plan.cluster.device.memory_bytes // 2
    sizes = f"{binary_bytes(whole)} of state and whole parameters"
    if whole <= half:
        return False, f"derived: {sizes} are within half of a device, {binary_bytes(half)}"
    return True, f"derived: {sizes} are more than half of a device, {binary_bytes(half)}"


def _state_with_whole_parameters(plan: Plan, pp_rank: int) -> int:
    """Return the bytes on the device of a pipeline rank while all its parameters are whole."""
    rank = plan.mesh.rank({Axis.PP: pp_rank})
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    buckets = plan_buckets(plan, rank_part(plan, pp_rank))
    whole = sum(bucket.num_elements * size for bucket in buckets if bucket.sliced)
    return bytes_held_by_pool(plan, rank).get("device", 0) + whole
