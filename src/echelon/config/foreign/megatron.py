"""The command line of Megatron-LM -> settings: its mesh, batch and ZeRO. Megatron-LM core 0.16.

What the command says of its model, its numbers and its course stands in megatron_model.py,
megatron_numbers.py and megatron_run.py. The data-parallel degree is never said: it is
world / (tp x pp x cp).
"""

from __future__ import annotations

from dataclasses import replace

from echelon.config.foreign.ledger import COUNT, Ledger
from echelon.config.foreign.megatron_experts import read_experts
from echelon.config.foreign.megatron_keys import (
    NOT_NEEDED,
    NOT_NEEDED_PREFIXES,
    ONLY,
    REFUSED,
    REFUSED_PREFIXES,
)
from echelon.config.foreign.megatron_model import read_model
from echelon.config.foreign.megatron_numbers import (
    SAMPLES,
    read_learning_rate,
    read_optimizer,
    read_precision,
)
from echelon.config.foreign.megatron_pipeline import read_pipeline
from echelon.config.foreign.megatron_run import read_recompute, read_run
from echelon.config.foreign.ranks import launched_ranks, set_data_mesh, shards_of_experts
from echelon.config.foreign.surroundings import Surroundings
from echelon.core.rulebook.imports import IMPORT_RANKS

TP, PP, CP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context"))
GLOBAL, MICRO = "--global-batch-size", "--micro-batch-size"
NO_MASK = "--no-create-attention-mask-in-dataloader"
KIND, SIZES = "--cp-comm-type", "--hierarchical-context-parallel-sizes"
COMMUNICATION = {
    "p2p": "ring",
    "a2a": "ulysses",
    "allgather": "gathered",
    "all_gather": "gathered",
    "a2a+p2p": "ulysses-ring",
}
SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def read_megatron(ledger: Ledger, around: Surroundings) -> None:
    """Note in `ledger` what becomes of every flag of a Megatron-LM command."""
    around = _read_mesh(ledger, around)
    layers = read_model(ledger, around)
    around = read_experts(ledger, around)
    read_pipeline(ledger, layers, around)
    gradients = read_precision(ledger)
    stage = _read_stage(ledger)
    data = _read_ranks(ledger, stage, around)
    _read_buckets(ledger, stage, gradients, data * around.degrees["cp"])
    batch = _read_batch(ledger, data)
    read_optimizer(ledger, around.degrees["tp"])
    steps = _read_steps(ledger, batch)
    read_learning_rate(ledger, steps, batch)
    read_recompute(ledger, layers, around)
    read_run(ledger, around)
    _read_rest(ledger)
    ledger.finish()


def _read_mesh(ledger: Ledger, around: Surroundings) -> Surroundings:
    degrees = {"tp": 1, "pp": 1, "cp": 1}
    whys = {
        "tp": "pieces of a matrix",
        "pp": "pipeline stages",
        "cp": "pieces of a sequence",
    }
    for axis, key in (("tp", TP), ("pp", PP), ("cp", CP)):
        degree = ledger.whole(key, COUNT, setting=f"mesh.{axis}")
        if degree is not None:
            ledger.set(key, f"mesh.{axis}", degree, whys[axis])
            degrees[axis] = degree
    _read_context(ledger, degrees["cp"])
    key = "--sequence-parallel"
    if ledger.flag(key, setting="mesh.sequence_parallel"):
        if degrees["tp"] > 1:
            ledger.set(key, "mesh.sequence_parallel", True, "norms and residuals are cut too")
        else:
            ledger.skip(key, "it splits over tp, and tp is 1")
    return around.with_degrees(**degrees)


def _read_context(ledger: Ledger, cp: int) -> None:
    """Map how context ranks meet; of two sizes the first is that of all-to-all, inside a ring."""
    word = ledger.word(KIND, COMMUNICATION, setting="context.kind")
    kind = COMMUNICATION[word] if word else "ring"
    if cp == 1:
        for key in (KIND, SIZES):
            ledger.skip(key, "a sequence is not cut")
        return
    if word:
        ledger.set(KIND, "context.kind", kind, "how pieces of a sequence meet")
    if not ledger.has(SIZES):
        return
    sizes = ledger.given[SIZES]
    match sizes:
        case [int(inner), int(outer)] if kind == "ulysses-ring" and inner * outer == cp:
            why = f"ranks that exchange heads, in a ring of {outer}"
            ledger.set(SIZES, "context.ulysses_degree", inner, why)
        case _ if kind != "ulysses-ring":
            ledger.skip(SIZES, f"it is about {KIND} a2a+p2p")
        case _:
            why = f"two sizes whose product is {CP} {cp}: of all-to-all, and of the ring"
            ledger.refuse(SIZES, why, setting="context.ulysses_degree")


def _read_stage(ledger: Ledger) -> int:
    """Map what data ranks share out; return the stage of ZeRO."""
    optimizer, torch_fsdp = "--use-distributed-optimizer", "--use-torch-fsdp2"
    own_fsdp, strategy = "--use-megatron-fsdp", "--data-parallel-sharding-strategy"
    kept = "--torch-fsdp2-no-reshard-after-forward"
    keys = (optimizer, torch_fsdp, own_fsdp)
    on = {key: bool(ledger.flag(key, setting="zero.stage")) for key in keys}
    name = ledger.word(strategy, SHARDING, setting="zero.stage")
    if on[torch_fsdp] and on[own_fsdp]:
        both = ledger.where(torch_fsdp, own_fsdp)
        ledger.conflict(f"{torch_fsdp} and {own_fsdp}", "zero.stage", both)
    if on[own_fsdp]:
        stage, key = SHARDING.index(name) if name else 0, strategy if name else own_fsdp
        ledger.skip(own_fsdp, f"{strategy} says what is shared out")
    else:
        key = torch_fsdp if on[torch_fsdp] else optimizer
        stage = 3 if on[torch_fsdp] else int(on[optimizer])
        ledger.skip(strategy, f"it is about {own_fsdp}")
    if on[optimizer] and key != optimizer:
        ledger.skip(optimizer, f"{key} says what is shared out")
    what = ("nothing", "optimizer state", "gradients too", "parameters too")[stage]
    source = "" if ledger.has(key) else ledger.default
    ledger.set(key, "zero.stage", stage, f"data ranks share out: {what}", source=source)
    if stage == 3:
        word = "never" if ledger.flag(kept) else "always"
        why = "whether a unit is gathered again for backward"
        source = "" if ledger.has(kept) else ledger.default
        ledger.set(kept, "zero.reshard_after_forward", word, why, source=source)
    else:
        ledger.skip(kept, f"it is about {torch_fsdp}")
    offload = "--optimizer-cpu-offload"
    if ledger.flag(offload, setting="zero.optimizer_offload"):
        ledger.set(offload, "zero.optimizer_offload", "host", "where optimizer state rests")
    ledger.only("--optimizer-offload-fraction", (1, 1.0), "all of it is offloaded, or nothing")
    return stage


def _read_ranks(ledger: Ledger, stage: int, around: Surroundings) -> int:
    """Map the data ranks: what the launcher starts, divided by the ranks of one model."""
    nodes, local = "--nnodes", "--nproc-per-node"
    count = ledger.whole(local, COUNT, setting="mesh")
    machines = ledger.whole(nodes, COUNT, setting="mesh") or 1
    source = ""
    if count is None:
        ledger.skip(nodes, f"ranks are not counted by it without {local}")
    else:
        ranks, source = machines * count, ledger.where(nodes, local)
        if around.ranks not in (None, ranks):
            ledger.conflict(
                f"{nodes} x {local} = {machines} x {count} = {ranks}, but --ranks {around.ranks}",
                "mesh",
                f"{source}, --ranks {around.ranks}",
            )
            return 1
        around = replace(around, ranks=ranks)
        ledger.skip(nodes, f"ranks: {machines} x {count} = {ranks}")
        ledger.skip(local, f"ranks: {machines} x {count} = {ranks}")
    if around.ranks is None and around.data_ranks == 1 and "cluster.preset" not in around.told:
        ledger.problems.append(
            IMPORT_RANKS.problem(
                f"the command does not say how many ranks are started; one model takes "
                f"{around.model_ranks}",
                key="mesh",
                set_by=ledger.path,
                works=(f"--ranks {around.model_ranks}", f"--ranks {2 * around.model_ranks}"),
            )
        )
        _judge_data_parallel_size(ledger, around, None)
        return 1
    data = launched_ranks(ledger, around)
    _judge_data_parallel_size(ledger, around, data.count if data else None)
    key = "--num-distributed-optimizer-instances"
    groups = ledger.whole(key, COUNT, setting="mesh.dp_replicate") or 1
    if data is None:
        return 1
    if data.count % groups or (groups > 1 and not stage):
        ledger.refuse(key, f"{groups} copies among {data.count} data ranks at stage {stage}")
        groups = 1
    else:
        ledger.skip(key, "copies of what is shared out: mesh.dp_replicate")
    data = replace(data, groups=groups, shards=shards_of_experts(around))
    set_data_mesh(ledger, stage, replace(data, source=source or data.source))
    return data.count


def _judge_data_parallel_size(ledger: Ledger, around: Surroundings, data: int | None) -> None:
    key = "--data-parallel-size"
    if ledger.has(key) and data is not None and ledger.given[key] == data:
        ledger.skip(key, f"Megatron-LM has no such flag; from the ranks follow as many: {data}")
    elif ledger.has(key):
        degrees = " x ".join(str(around.degrees[axis]) for axis in ("tp", "pp", "cp"))
        follows = "" if data is None else f" = {data * around.model_ranks} / ({degrees}) = {data}"
        ledger.refuse(
            key,
            f"Megatron-LM has no such flag: it is world / (tp x pp x cp){follows}",
            works=() if data is None else (f"--ranks {data * around.model_ranks}",),
        )


def _read_buckets(ledger: Ledger, stage: int, gradients: int, ranks: int) -> None:
    key = "--ddp-bucket-size"
    elements = ledger.whole(key, COUNT, setting="zero.bucket_bytes")
    if elements is not None and stage < 3 and ranks > 1:
        why = f"{elements} elements x {gradients} bytes"
        ledger.set(key, "zero.bucket_bytes", elements * gradients, why)
    else:
        ledger.skip(key, "a bucket is a unit at stage 3, and one data rank reduces nothing")


def _read_batch(ledger: Ledger, data: int) -> int | None:
    """Map the batch, and return its sequences; without a size there is one microbatch."""
    micro = ledger.whole(MICRO, COUNT, setting="batch.microbatch_sequences")
    if micro is not None:
        why = "sequences of one forward pass of a rank"
        ledger.set(MICRO, "batch.microbatch_sequences", micro, why)
    total = ledger.whole(GLOBAL, COUNT, setting="batch.global_sequences")
    if total is not None:
        why = "sequences of one optimizer step"
        if micro and total % (micro * data) == 0:
            why += f": {total // (micro * data)} microbatches on each of {data} data ranks"
        ledger.set(GLOBAL, "batch.global_sequences", total, why)
    elif micro is not None and not ledger.has(GLOBAL):
        total = micro * data
        why = "one microbatch on each data rank"
        ledger.set(GLOBAL, "batch.global_sequences", total, why, source=ledger.where(MICRO))
    key = "--seq-length"
    if (length := ledger.whole(key, COUNT, setting="batch.sequence_length")) is not None:
        ledger.set(key, "batch.sequence_length", length, "tokens of a sequence")
    _read_documents(ledger)
    return total


def _read_documents(ledger: Ledger) -> None:
    """Map whether attention crosses ends of documents; Megatron-LM says so in the mask it makes."""
    key = "--reset-attention-mask"
    if not ledger.flag(key, setting="batch.documents"):
        ledger.skip(key, "attention goes through all of a sequence")
    elif ledger.has(NO_MASK) and ledger.given[NO_MASK] is True:
        ledger.skip(key, f"{NO_MASK} leaves no mask to reset")
    else:
        ledger.set(key, "batch.documents", "separate", "attention stays inside each document")


def _read_steps(ledger: Ledger, batch: int | None) -> int | None:
    steps = ledger.whole("--train-iters", COUNT, setting="train.steps")
    if steps is not None:
        ledger.set("--train-iters", "train.steps", steps, "optimizer steps")
    key = "--train-samples"
    samples = ledger.whole(key, COUNT, setting="train.steps")
    if samples is not None and batch is None:
        ledger.refuse(key, SAMPLES, works=(f"{GLOBAL} N",), setting="train.steps")
    elif samples is not None and batch:
        steps = max(1, samples // batch)
        ledger.set(key, "train.steps", steps, f"{samples} samples / {batch} of a step")
    return steps


def _read_rest(ledger: Ledger) -> None:
    for key, why in NOT_NEEDED.items():
        ledger.skip(key, why)
    for key, (allowed, why) in ONLY.items():
        ledger.only(key, allowed, why)
    for key, why in REFUSED.items():
        if ledger.has(key):
            ledger.refuse(key, why)
    for key in ledger.given:
        if key not in ledger.known:
            for prefix, why in NOT_NEEDED_PREFIXES.items():
                if key.startswith(prefix):
                    ledger.skip(key, why)
            for prefix, why in REFUSED_PREFIXES.items():
                if key.startswith(prefix) and key not in ledger.known:
                    ledger.known[key] = None
                    ledger.refuse(key, why)
