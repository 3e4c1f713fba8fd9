# SPDX-License-Identifier: Apache-2.0
"""Values that are "auto" or not set, and why: dtypes, ZeRO, recompute, overlap, step lines, stages.

For schedules that no builder makes, the actions of each rank, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import ceil, log2
from typing import TYPE_CHECKING, cast

from echelon.config.derived.pipeline import (
    AUTO,
    EVEN,
    FILE,
    LIMIT_KEY,
    SCHEDULE_KEY,
    STAGES_KEY,
    TIMES_KEY,
    VIRTUAL_KEY,
    in_flight_limits,
    schedule_file,
    stages_per_rank,
)
from echelon.config.files.measurements import unit_times
from echelon.config.job import Job
from echelon.config.model.settings import build_model
from echelon.config.view import View, mesh_of, record
from echelon.core.axis import LOSS_AXES, Axis
from echelon.core.cluster import Cluster, fast_domain
from echelon.core.errors import InfeasiblePlan
from echelon.core.mesh import Mesh
from echelon.core.parameters import num_parameters
from echelon.core.plan import (
    DTYPE_BYTES,
    Accumulation,
    DType,
    Fp8Format,
    Pipeline,
    Plan,
    Recompute,
    RecomputedOperator,
    TensorOverlapKind,
    Zero,
)
from echelon.core.units import binary_bytes
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.cost.bytes.nccl import joins_by_nvlink
from echelon.cost.seconds.stages import (
    PipelineOrder,
    Stages,
    balance,
    balanced_stages,
    imbalance,
    split_layers,
)
from echelon.cost.seconds.unit_times import UnitTimes, durations_from_stages
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part
from echelon.schedule.action import Schedule
from echelon.schedule.from_plan import schedule_from_rows, stage_placement_from_plan

if TYPE_CHECKING:
    from echelon.schedule.automatic import FoundSchedule

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
    found = record(view, Recompute, "recompute")
    if view.value("recompute.operators") != "auto" or found.policy != "selective":
        return found, {}
    operators = cheap_operators(view)
    source = "derived: what takes next to no time"
    return replace(found, operators=operators), {"recompute.operators": (list(operators), source)}


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


MOST_SEARCHED_TWICE = 128
"""Ranks x microbatches up to which a search looks at two stages on a rank, too: some seconds."""

SEARCH_NOTE_SEPARATOR = "; found: "
"""What parts the source of `pipeline.schedule` from what the search that it asked for has found."""

Derived = Mapping[str, tuple[object, str]]
"""Value and source of each setting that was left to us, by its key."""


def provisional_pipeline(view: View) -> Pipeline:
    """Return the pipeline with stages as they are listed, else even, and without rows."""
    virtual, layers = stages_per_rank(view), view.integer("model.layers")
    listed = view.stage_lists()
    return Pipeline(
        schedule=view.word(SCHEDULE_KEY),
        virtual_stages=virtual,
        stages=split_layers(layers, virtual * view.integer("mesh.pp"))
        if listed is None
        else tuple(tuple(stage) for stage in listed),
    )


def place_stages(view: View, plan: Plan) -> tuple[Plan, Derived]:
    """Return a plan of a provisional pipeline with its stages and rows, and what was derived."""
    name = view.word(SCHEDULE_KEY)
    derived: dict[str, tuple[object, str]] = {}
    if VIRTUAL_KEY not in view.entries and plan.layout.pipeline.virtual_stages > 1:
        per_rank = plan.layout.pipeline.virtual_stages
        derived[VIRTUAL_KEY] = per_rank, f'derived: what "{name}" puts on a rank'
    times = unit_times(plan, view.word(TIMES_KEY))
    if name == AUTO:
        pipeline, held = _automatic(view, plan, times, derived)
    elif name == FILE:
        rows = _rows(schedule_file(view).schedule)
        pipeline = replace(plan.layout.pipeline, rows=rows)
        held = _stages_of_schedule(schedule_from_rows(name, rows))
    else:
        pipeline = plan.layout.pipeline
        held = _stages_of_schedule(stage_placement_from_plan(plan))
    word = view.entry(STAGES_KEY).value
    if name != AUTO and word == AUTO:
        order = PipelineOrder.from_plan(
            replace(plan, layout=replace(plan.layout, pipeline=pipeline))
        )
        stages = balanced_stages(order, times, plan.model.layers)
        pipeline = replace(pipeline, stages=stages)
    if word in (AUTO, EVEN):
        source = _how_balanced(pipeline.stages, held, times, even=word == EVEN)
        derived[STAGES_KEY] = pipeline.stages, source
    return replace(plan, layout=replace(plan.layout, pipeline=pipeline)), derived


def _stages_of_schedule(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    return tuple(schedule.stages_of(rank) for rank in range(schedule.num_ranks))


def _rows(schedule: Schedule) -> tuple[str, ...]:
    return tuple(" ".join(map(str, row)) for row in schedule.actions)


def _how_balanced(
    stages: Stages, held: Sequence[Sequence[int]], times: UnitTimes, *, even: bool
) -> str:
    if len(stages) == 1:
        return "derived: one stage holds every block"
    now = imbalance(stages, held, times)
    if even:
        return f"derived: an even split, slowest rank {now:.2f}x of the mean"
    before = imbalance(split_layers(sum(map(len, stages)), len(stages)), held, times)
    return (
        f"derived: balanced by {times.source} times, slowest rank {now:.2f}x of the mean "
        f"(even split {before:.2f}x)"
    )


def _automatic(
    view: View, plan: Plan, times: UnitTimes, derived: dict[str, tuple[object, str]]
) -> tuple[Pipeline, tuple[tuple[int, ...], ...]]:
    """Return the pipeline with the best schedule found, and what each rank holds under it.

    With two stages on a rank they may lie in turn or as a V; the better is taken. Each cut is tried
    under each placement, so that the stages found, written out, give this very schedule again.
    """
    pp, limits = plan.mesh.pp, in_flight_limits(view)
    candidates = [
        candidate
        for virtual in _stages_on_a_rank(view, plan)
        for candidate in _candidates(view, plan, times, virtual)
    ]
    stages, best = min(candidates, key=lambda candidate: candidate[1].makespan_s)
    virtual = len(stages) // pp
    if limits is None:
        source = f"derived: pp x virtual_stages = {pp} x {virtual}, the peak of 1f1b"
        derived[LIMIT_KEY] = pp * virtual, source
    if virtual != plan.layout.pipeline.virtual_stages:
        derived[VIRTUAL_KEY] = virtual, f"derived: the search is fastest with {virtual} on a rank"
    note = _how_good(best, [found for _, found in candidates])
    source = view.entry(SCHEDULE_KEY).source
    derived[SCHEDULE_KEY] = AUTO, f"{source}{SEARCH_NOTE_SEPARATOR}{note}"
    pipeline = replace(
        plan.layout.pipeline, virtual_stages=virtual, stages=stages, rows=_rows(best.schedule)
    )
    return pipeline, _stages_of_schedule(best.schedule)


def _stages_on_a_rank(view: View, plan: Plan) -> tuple[int, ...]:
    """Return how many stages a rank may have: as it is set, else one or two, if that is quick.

    Two are half as large each, so that as many pairs again fit into the same memory.
    """
    pp, word = plan.mesh.pp, view.entry(STAGES_KEY).value
    free = VIRTUAL_KEY not in view.entries and LIMIT_KEY not in view.entries
    small = pp * plan.num_microbatches <= MOST_SEARCHED_TWICE
    if free and small and word in (AUTO, EVEN) and 2 * pp <= plan.model.layers:
        return 1, 2
    return (plan.layout.pipeline.virtual_stages,)


def _candidates(
    view: View, plan: Plan, times: UnitTimes, virtual: int
) -> Iterator[tuple[Stages, FoundSchedule]]:
    """Yield ways to cut the model and to place its stages, and the schedule found for each."""
    from echelon.schedule.automatic import find_schedule

    pp, layers, word = plan.mesh.pp, plan.model.layers, view.entry(STAGES_KEY).value
    limits = in_flight_limits(view) or (pp * virtual,) * pp
    placements = stage_placements(pp, virtual)
    if word == AUTO:
        cuts = [balance(times, layers, stages_of_ranks(ranks)) for ranks in placements]
    elif word == EVEN:
        cuts = [split_layers(layers, pp * virtual)]
    else:
        cuts = [plan.layout.pipeline.stages]
    for stages in dict.fromkeys(cuts):
        for ranks in placements:
            durations = durations_from_stages(stages, times)
            try:
                found = find_schedule(
                    ranks, plan.num_microbatches, durations, most_in_flight=limits
                )
            except InfeasiblePlan as error:
                set_by = view.set_by(LIMIT_KEY, VIRTUAL_KEY)
                raise InfeasiblePlan(
                    replace(problem, set_by=set_by) for problem in error.problems
                ) from error
            yield stages, found


def stage_placements(pp: int, virtual: int) -> tuple[tuple[int, ...], ...]:
    """Return the rank of each stage: in turn over the ranks; with two on each, also down and up."""
    in_turn = tuple(stage % pp for stage in range(pp * virtual))
    if virtual != 2:
        return (in_turn,)
    return in_turn, tuple(min(stage, 2 * pp - 1 - stage) for stage in range(2 * pp))


def stages_of_ranks(stage_ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, given the rank of each stage."""
    ranks = range(max(stage_ranks) + 1)
    return tuple(tuple(s for s, owner in enumerate(stage_ranks) if owner == r) for r in ranks)


def search_note_of_job(job: Job) -> str:
    """Return what a search for the schedule of a job has found; nothing where there was none."""
    return job.source_of(SCHEDULE_KEY).partition(SEARCH_NOTE_SEPARATOR)[2]


def _how_good(found: FoundSchedule, candidates: Sequence[FoundSchedule]) -> str:
    """Return how long a step takes, beside the best fixed schedule and the least that is known."""
    fixed = [item for candidate in candidates for item in candidate.fixed.items()]
    text = f"{1e3 * found.makespan_s:.4g} ms a step"
    if fixed:
        name, seconds = min(fixed, key=lambda item: item[1])
        less = 100 * (1 - found.makespan_s / seconds)
        text += f", {less:.1f} % less than the best fixed one ({name}, {1e3 * seconds:.4g} ms)"
    least = min(candidate.lower_bound_s for candidate in candidates)
    gap = found.makespan_s / least - 1 if least else 0.0
    return f"{text}, at most {100 * gap:.1f} % above the best there is"
