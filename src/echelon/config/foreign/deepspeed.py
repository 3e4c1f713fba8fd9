"""A DeepSpeed JSON -> settings. Keys and defaults are those of DeepSpeed 0.19 and before.

https://www.deepspeed.ai/docs/config-json; "auto" as Hugging Face's integration resolves it.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.config.foreign.deepspeed_experts import read_experts
from echelon.config.foreign.deepspeed_keys import (
    NOT_NEEDED,
    NOT_NEEDED_TABLES,
    OFF_TABLES,
    ONLY,
    REFUSED_TABLES,
    SECTIONS,
)
from echelon.config.foreign.deepspeed_offload import read_activations
from echelon.config.foreign.deepspeed_optimizer import read_optimizer, read_scheduler
from echelon.config.foreign.deepspeed_precision import read_precision
from echelon.config.foreign.deepspeed_zero import TABLE, read_stage, read_zero
from echelon.config.foreign.ledger import COUNT, FROM_ZERO, Ledger
from echelon.config.foreign.ranks import (
    DataRanks,
    launched_ranks,
    read_count,
    set_batch,
    set_data_mesh,
    shards_of_experts,
)
from echelon.config.foreign.surroundings import Surroundings

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MICS = "zero_optimization.mics_shard_size"


PARTITIONS = {
    "uniform": ("even", "as many blocks on each stage"),
    "parameters": ("auto", "balanced by times, which grow with parameters"),
    "profile": ("auto", "balanced by times; pipeline.times has measured ones"),
    "best": ("auto", "balanced by times"),
    "auto": ("auto", "balanced by times"),
}
"""The ways of DeepSpeed's pipeline to cut layers into stages: what each is here, and why."""


def read_deepspeed(ledger: Ledger, around: Surroundings) -> None:
    """Note in `ledger` what becomes of every key of a DeepSpeed configuration."""
    old_form = isinstance(ledger.given.get(TABLE), bool)
    ledger.sections(name for name in SECTIONS if not (old_form and name == TABLE))
    around = read_experts(ledger, _read_model_degrees(ledger, around))
    stage = read_stage(ledger)
    gradients = read_precision(ledger, around)
    data = _read_ranks_and_batch(ledger, stage, around)
    read_zero(ledger, stage, gradients, data, around)
    read_activations(ledger)
    read_optimizer(ledger)
    read_scheduler(ledger)
    _read_clipping(ledger)
    _read_rest(ledger)
    ledger.finish()


def _read_model_degrees(ledger: Ledger, around: Surroundings) -> Surroundings:
    degrees = dict(around.degrees)
    key = "tensor_parallel.autotp_size"
    if (tp := ledger.whole(key, FROM_ZERO, setting="mesh.tp")) is not None and tp > 1:
        ledger.set(key, "mesh.tp", tp, "pieces of a matrix")
        degrees["tp"] = tp
    else:
        ledger.skip(key, "0 and 1 leave matrices whole")
    key = "pipeline.stages"
    if ledger.is_auto(key):
        ledger.skip(key, "mesh.pp of what the run builds on")
    elif (pp := ledger.whole(key, COUNT, setting="mesh.pp")) is not None:
        ledger.set(key, "mesh.pp", pp, "pipeline stages")
        degrees["pp"] = pp
    _read_partition(ledger)
    key = "sequence_parallel_size"
    if (cp := ledger.whole(key, COUNT, setting="mesh.cp")) is not None:
        ledger.set(key, "mesh.cp", cp, "pieces of a sequence")
        degrees["cp"] = cp
        if cp > 1:
            ledger.set(key, "context.kind", "ulysses", "heads are exchanged for the sequence")
    return around.with_degrees(**degrees)


def _read_partition(ledger: Ledger) -> None:
    """Map how layers are cut into stages; what DeepSpeed weighs by parameters has a time here."""
    key, setting = "pipeline.partition", "pipeline.stages"
    given = ledger.given.get(key)
    if isinstance(given, str) and given.startswith("type:") and ledger.has(key):
        ledger.set(key, setting, "auto", "blocks are of one type, and balanced by their times")
    elif (word := ledger.word(key, PARTITIONS, setting=setting)) is not None:
        ledger.set(key, setting, *PARTITIONS[word])


def _read_ranks_and_batch(ledger: Ledger, stage: int, around: Surroundings) -> int:
    settings = ("batch.global_sequences", "batch.microbatch_sequences", "batch.global_sequences")
    total, micro, steps = (
        read_count(ledger, key, setting, "follows from the run and its ranks")
        for key, setting in zip(BATCH, settings, strict=True)
    )
    data = launched_ranks(ledger, around)
    if total and micro and steps:
        data = _told_by_batch(ledger, (total, micro, steps), data, around)
    if data is None:
        return 1
    data = replace(data, shards=shards_of_experts(around))
    set_data_mesh(ledger, stage, replace(data, groups=_groups(ledger, stage, data.count)))
    set_batch(ledger, BATCH, (total, micro, steps), data.count, around.microbatch)
    if steps:
        ledger.skip(BATCH[2], "follows: global_sequences / (microbatch_sequences x data ranks)")
    return data.count


def _told_by_batch(
    ledger: Ledger,
    sizes: tuple[int, int, int],
    launched: DataRanks | None,
    around: Surroundings,
) -> DataRanks | None:
    """Return the data ranks that the three sizes of a batch tell, unless --ranks says others."""
    total, micro, steps = sizes
    told, rest = divmod(total, micro * steps)
    product = f"{BATCH[0]} / ({BATCH[1]} x {BATCH[2]}) = {total} / ({micro} x {steps})"
    if launched is None:
        return None
    if rest == 0 and (around.ranks is None or launched.count == told):
        return DataRanks(count=told, why=product, source=ledger.where(*BATCH))
    wanted = f"{launched.count} data ranks" if around.ranks else "a whole number of ranks"
    ledger.conflict(
        f"{product} = {total / (micro * steps):g}, not {wanted}",
        "batch.global_sequences",
        ledger.where(*BATCH),
        works=[f"{BATCH[0]} = {micro * steps * launched.count}"],
    )
    return launched


def _groups(ledger: Ledger, stage: int, data: int) -> int:
    """Return how many groups hold a copy each of what is shared out (MiCS, hybrid sharding)."""
    if not ledger.has(MICS) or ledger.given[MICS] == -1:
        ledger.skip(MICS, "-1: one group shares everything out")
        return 1
    size = ledger.whole(MICS, COUNT, setting="mesh.dp_shard")
    if size is None:
        return 1
    if stage != 3 or data % size:
        ledger.refuse(
            MICS,
            f"groups of {size} among {data} data ranks at stage {stage}; stage 3 and a divisor fit",
            setting="mesh.dp_shard",
        )
        return 1
    ledger.skip(MICS, f"mesh.dp_shard = {size}, mesh.dp_replicate = {data // size}")
    return data // size


def _read_clipping(ledger: Ledger) -> None:
    key, setting = "gradient_clipping", "optimizer.clip_norm"
    if ledger.is_auto(key):
        ledger.skip(key, f"{setting} of what the run builds on")
    elif not ledger.has(key):
        ledger.set(
            key, setting, "none", "DeepSpeed does not clip by default", source=ledger.default
        )
    elif (limit := ledger.number(key, setting=setting)) is not None:
        why = "0 is no limit" if limit == 0 else "largest norm over all parameters and ranks"
        ledger.set(key, setting, limit or "none", why)


def _read_rest(ledger: Ledger) -> None:
    key = "steps_per_print"
    if ledger.has(key) and (every := ledger.whole(key, COUNT, setting="observe.log_every")):
        ledger.set(key, "observe.log_every", every, "steps between step lines")
    for key, (kind, why) in NOT_NEEDED.items():
        if ledger.read(key, kind) is not None:
            ledger.skip(key, why)
    for key, (allowed, why) in ONLY.items():
        ledger.only(key, allowed, why)
    for table, why in NOT_NEEDED_TABLES.items():
        ledger.skip_table(table, why)
    for table, (switch, why) in OFF_TABLES.items():
        _read_off_table(ledger, table, switch, why)
    for table, why in REFUSED_TABLES.items():
        ledger.refuse_table(table, why)


def _read_off_table(ledger: Ledger, table: str, switch: str, why: str) -> None:
    """Accept a feature that is switched off, whatever else its table says."""
    on = table if isinstance(ledger.given.get(table), bool) else f"{table}.{switch}"
    if ledger.only(on, (False,), why):
        for key in ledger.keys_of(table):
            if key != on:
                ledger.skip(key, f"{on} is false")
    ledger.know_table(table)
