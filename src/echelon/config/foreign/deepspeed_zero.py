"""The zero_optimization table of a DeepSpeed JSON: stage, buckets, units of stage 3."""

from __future__ import annotations

from math import ceil

from echelon.config.foreign.deepspeed_offload import read_offload
from echelon.config.foreign.ledger import FROM_ZERO, Ledger
from echelon.config.foreign.surroundings import Surroundings
from echelon.config.kinds import Integer
from echelon.core.plan import DTYPE_BYTES

TABLE = "zero_optimization"
STAGE = Integer(minimum=0, maximum=3)
PREFETCH = f"{TABLE}.stage3_prefetch_bucket_size"
PERSISTENCE = f"{TABLE}.stage3_param_persistence_threshold"
MAX_LIVE = f"{TABLE}.stage3_max_live_parameters"
MAX_REUSE = f"{TABLE}.stage3_max_reuse_distance"
BUCKET = f"{TABLE}.reduce_bucket_size"

# DeepSpeed's own, of the two that bound what stays whole between forward and backward.
DEFAULT_MAX_LIVE = 10**9


def read_stage(ledger: Ledger) -> int:
    """Map the stage, and return it; the old form of the table is true or false."""
    if isinstance(old := ledger.given.get(TABLE), bool):
        ledger.known[TABLE] = None
        ledger.set(TABLE, "zero.stage", int(old), "true is stage 1")
        return int(old)
    key = f"{TABLE}.stage"
    stage = ledger.whole(key, STAGE, setting="zero.stage")
    if stage is not None:
        ledger.set(key, "zero.stage", stage, "what data ranks share out")
    elif not ledger.has(key):
        why = "DeepSpeed shares nothing out by default"
        ledger.set(key, "zero.stage", 0, why, source=ledger.default)
    return stage or 0


def read_zero(ledger: Ledger, stage: int, gradients: str, data: int, around: Surroundings) -> None:
    """Map buckets, units and offload; `gradients` is the dtype in which they accumulate."""
    _read_bucket(ledger, stage, gradients, data, around)
    stage_3_keys = (PREFETCH, PERSISTENCE, MAX_LIVE, MAX_REUSE)
    if stage == 3:
        _read_persistence(ledger, around)
        _read_prefetch(ledger, around)
        _read_resharding(ledger, around)
    else:
        for key in stage_3_keys:
            ledger.skip(key, f"it is about stage 3, and the stage is {stage}")
    read_offload(ledger)


def _read_bucket(
    ledger: Ledger, stage: int, gradients: str, data: int, around: Surroundings
) -> None:
    if stage == 3 or data * around.degrees["cp"] == 1:
        why = "a bucket is a unit at stage 3" if stage == 3 else "one data rank reduces nothing"
        ledger.skip(BUCKET, why)
        return
    size = DTYPE_BYTES[gradients]
    if ledger.is_auto(BUCKET):
        if around.model is not None:
            hidden = around.model.hidden
            why = f"hidden^2 elements, as Hugging Face has it: {hidden}^2 x {size} bytes"
            ledger.set(BUCKET, "zero.bucket_bytes", hidden * hidden * size, why)
        return
    elements = ledger.whole(BUCKET, setting="zero.bucket_bytes")
    if elements is not None:
        why = f"{elements} elements x {size} bytes of {gradients}"
        ledger.set(BUCKET, "zero.bucket_bytes", elements * size, why)


def _read_persistence(ledger: Ledger, around: Surroundings) -> None:
    setting = "zero.keep_whole_below"
    if ledger.is_auto(PERSISTENCE):
        if around.model is not None:
            hidden = around.model.hidden
            why = f"10 x hidden, as Hugging Face has it: parameters up to 10 x {hidden}"
            ledger.set(PERSISTENCE, setting, 10 * hidden + 1, why)
        return
    elements = ledger.whole(PERSISTENCE, FROM_ZERO, setting=setting)
    if elements is not None:
        why = f"parameters of up to {elements} elements are not cut"
        ledger.set(PERSISTENCE, setting, elements + 1 if elements else 0, why)


def _read_prefetch(ledger: Ledger, around: Surroundings) -> None:
    """Map how much is gathered ahead to whole units, within what may be whole at a time."""
    units, keys, whys = None, list[str](), list[str]()
    block = around.block_elements
    if ledger.is_auto(PREFETCH):
        if around.model is not None:
            hidden = around.model.hidden
            units, keys = 1, [PREFETCH]
            whys.append(
                f"0.9 x hidden^2, as Hugging Face has it: {int(0.9 * hidden * hidden)} elements "
                f"of a block of {block}: one unit"
            )
    elif (elements := ledger.whole(PREFETCH, setting="zero.prefetch")) is not None and block:
        units, keys = min(ceil(elements / block), around.stage_blocks), [PREFETCH]
        whys.append(f"{elements} elements of blocks of {block}: {units} units")
    live = ledger.whole(MAX_LIVE, setting="zero.prefetch")
    if live is not None and block:
        fit = max(0, live // block - 1)
        if fit < (1 if units is None else units):
            units, keys = fit, [*keys, MAX_LIVE]
            whys.append(f"{live} elements whole at a time: {fit} beside the one that computes")
        else:
            ledger.skip(MAX_LIVE, f"at most 1 + zero.prefetch blocks of {block} are whole")
    if units is not None:
        ledger.set(keys[-1], "zero.prefetch", units, "; ".join(whys), source=ledger.where(*keys))
        for key in keys[:-1]:
            ledger.skip(key, f"less, because of {keys[-1]}")


def _read_resharding(ledger: Ledger, around: Surroundings) -> None:
    """Map the reuse distance: from the forward of the first block to its backward.

    DeepSpeed keeps a unit that is needed again within the distance, as long as what is whole stays
    within its other bound. Here that is decided for all units together.
    """
    distance = ledger.whole(MAX_REUSE, setting="zero.reshard_after_forward")
    if distance is None or around.model is None:
        return
    bound = ledger.given.get(MAX_LIVE)
    live = int(bound) if isinstance(bound, int | float) else DEFAULT_MAX_LIVE
    whole = around.block_elements * around.stage_blocks
    kept = distance >= 2 * whole and live >= whole
    word = "never" if kept else "always"
    why = (
        f"a stage has {whole} elements of blocks, twice that lies between forward and backward of "
        f"the first: {'both bounds hold it' if kept else 'more than is kept'}"
    )
    ledger.set(MAX_REUSE, "zero.reshard_after_forward", word, why)
