"""What "auto" means, for ZeRO and step lines: a value, and the reason that stands as its source."""

from __future__ import annotations

from itertools import count

from echelon.config.view import View, record
from echelon.core.axis import Axis
from echelon.core.plan import DTYPE_BYTES, Accumulation, Plan, Zero
from echelon.core.units import binary_bytes
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.layout.buckets import plan_buckets
from echelon.layout.stage import rank_part

NO_FOLDER = "none"

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


def default_accumulation(stage: int) -> tuple[Accumulation, str]:
    """Return how gradients of microbatches add up, and why.

    Whole gradients are sent once a step; slices take 1/N of the memory and are sent after every
    microbatch, which is what stages 2 and 3 are for.
    """
    if stage < 2:
        return "whole", f"derived: stage {stage} holds whole gradients, sent once per step"
    return "slices", f"derived: stage {stage} holds slices of gradients, sent per microbatch"


def read_zero(view: View) -> tuple[Zero, dict[str, tuple[object, str]]]:
    """Return ZeRO's settings, and value and source of those that were left to us.

    `reshard_after_forward` of "auto" is provisionally true: see `default_resharding`.
    """
    stage, folder = view.integer("zero.stage"), view.word("zero.offload_dir")
    accumulate, derived = view.word("zero.accumulate"), dict[str, tuple[object, str]]()
    if accumulate == "auto":
        accumulate, source = default_accumulation(stage)
        derived["zero.accumulate"] = accumulate, source
    zero = record(
        view,
        Zero,
        "zero",
        accumulate=accumulate,
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
