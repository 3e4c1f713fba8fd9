# SPDX-License-Identifier: Apache-2.0
"""The command line of Megatron-LM -> settings: mesh, batch, ZeRO, stages. Megatron-LM core 0.16.

What the command says of its model, experts, numbers and course is read by the files beside this
one. The data-parallel degree is never given: it is world / (tp x pp x cp).

Megatron-LM interleaves as soon as a rank has several stages (Narayanan et al. 2021, section 2.2),
in groups of pp microbatches unless it is set otherwise, and cuts its layers evenly; with
--account-for-... the embedding or the loss counts as a layer there. A layout lists all stages:
"Et*3|(tt|)*29,t|L" is the embedding and three layers, 29 times two layers, one layer, the loss.
"""

from __future__ import annotations

import re
from dataclasses import replace

from echelon.core.choices.context_kinds import PLAIN_CONTEXT_KIND, kinds_with_degree
from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.megatron.abilities import NAMES, TABLES
from echelon.interop.megatron.read_experts import read_experts
from echelon.interop.megatron.read_model import read_model
from echelon.interop.megatron.read_numbers import (
    SAMPLES,
    read_learning_rate,
    read_optimizer,
    read_precision,
    read_recompute,
    read_run,
)
from echelon.interop.ranks import (
    blocks_of_stages,
    known_or_fewest_ranks,
    read_degrees,
    set_data_mesh,
    shards_of_experts,
)

TP, PP, CP = (f"--{axis}-parallel-size" for axis in ("tensor-model", "pipeline-model", "context"))
GLOBAL, MICRO = "--global-batch-size", "--micro-batch-size"
_NO_MASK = "--no-create-attention-mask-in-dataloader"
KIND, SIZES = "--cp-comm-type", "--hierarchical-context-parallel-sizes"
COMMUNICATION = {
    form: kind
    for kind, word in NAMES.context_kinds.items()
    for form in (word.replace("_", ""), word)
}
"""What Megatron-LM calls a kind; it takes allgather for all_gather, too."""
_SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")

STAGES, VIRTUAL = "pipeline.stages", "pipeline.virtual_stages"
SCHEDULE = "pipeline.schedule"
INTERLEAVED = by_word(NAMES.schedules)["interleaved"]
_VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
_VIRTUAL_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
ENDS = tuple(f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last"))
LAYOUT = "--pipeline-model-parallel-layout"
_ACCOUNTS = tuple(f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every flag of a Megatron-LM command."""
    context = _read_mesh(reader, context)
    layers = read_model(reader, context)
    context = read_experts(reader, context)
    read_pipeline(reader, layers, context)
    gradients = read_precision(reader)
    stage = _read_stage(reader)
    data = _read_ranks(reader, stage, context)
    _read_buckets(reader, stage, gradients, data * context.degrees["cp"])
    batch = _read_batch(reader, data)
    read_optimizer(reader, context.degrees["tp"])
    steps = _read_steps(reader, batch)
    read_learning_rate(reader, steps, batch)
    read_recompute(reader, layers, context)
    read_run(reader, context)
    reader.finish(TABLES.keys, "rest")


def _read_mesh(reader: KeyReader, context: ImportContext) -> ImportContext:
    degrees = read_degrees(reader, {"tp": TP, "pp": PP, "cp": CP})
    _read_context(reader, degrees["cp"])
    key = "--sequence-parallel"
    if reader.flag(key, setting="mesh.sequence_parallel"):
        if degrees["tp"] > 1:
            reader.set(key, "mesh.sequence_parallel", True, "norms and residuals are cut too")
        else:
            reader.skip(key, "it splits over tp, and tp is 1")
    return context.with_degrees(**degrees)


def _read_context(reader: KeyReader, cp: int) -> None:
    """Map how context ranks meet; of two sizes the first is that of all-to-all, inside a ring."""
    if cp == 1:
        reader.word(KIND, COMMUNICATION, setting="context.kind")
        reader.skip_all((KIND, SIZES), "a sequence is not cut")
        return
    why = "how pieces of a sequence meet"
    kind = reader.take(KIND, "context.kind", COMMUNICATION, why) or PLAIN_CONTEXT_KIND
    if not reader.has(SIZES):
        return
    sizes, with_degree = reader.given[SIZES], kind in kinds_with_degree()
    match sizes:
        case [int(inner), int(outer)] if with_degree and inner * outer == cp:
            why = f"ranks that exchange heads, in a ring of {outer}"
            reader.set(SIZES, "context.ulysses_degree", inner, why)
        case _ if not with_degree:
            reader.skip(SIZES, f"it is about {KIND} a2a+p2p")
        case _:
            why = f"two sizes whose product is {CP} {cp}: of all-to-all, and of the ring"
            reader.refuse(SIZES, why, setting="context.ulysses_degree")


def _read_stage(reader: KeyReader) -> int:
    """Map what data ranks share out; return the stage of ZeRO."""
    optimizer, torch_fsdp = "--use-distributed-optimizer", "--use-torch-fsdp2"
    own_fsdp, strategy = "--use-megatron-fsdp", "--data-parallel-sharding-strategy"
    kept = "--torch-fsdp2-no-reshard-after-forward"
    keys = (optimizer, torch_fsdp, own_fsdp)
    on = {key: bool(reader.flag(key, setting="zero.stage")) for key in keys}
    name = reader.word(strategy, _SHARDING, setting="zero.stage")
    if on[torch_fsdp] and on[own_fsdp]:
        both = reader.where(torch_fsdp, own_fsdp)
        reader.conflict(f"{torch_fsdp} and {own_fsdp}", "zero.stage", both)
    if on[own_fsdp]:
        stage, key = _SHARDING.index(name) if name else 0, strategy if name else own_fsdp
        reader.skip(own_fsdp, f"{strategy} says what is shared out")
    else:
        key = torch_fsdp if on[torch_fsdp] else optimizer
        stage = 3 if on[torch_fsdp] else int(on[optimizer])
        reader.skip(strategy, f"it is about {own_fsdp}")
    if on[optimizer] and key != optimizer:
        reader.skip(optimizer, f"{key} says what is shared out")
    what = ("nothing", "optimizer state", "gradients too", "parameters too")[stage]
    reader.set_or_default(key, "zero.stage", stage, f"data ranks share out: {what}")
    if stage == 3:
        word = "never" if reader.flag(kept) else "always"
        why = "whether a unit is gathered again for backward"
        reader.set_or_default(kept, "zero.reshard_after_forward", word, why)
    else:
        reader.skip(kept, f"it is about {torch_fsdp}")
    offload = "--optimizer-cpu-offload"
    if reader.flag(offload, setting="zero.optimizer_offload"):
        reader.set(offload, "zero.optimizer_offload", "host", "where optimizer state rests")
    reader.only("--optimizer-offload-fraction", (1, 1.0), "all of it is offloaded, or nothing")
    return stage


def _read_ranks(reader: KeyReader, stage: int, context: ImportContext) -> int:
    """Map the data ranks: what the launcher starts, divided by the ranks of one model."""
    nodes, local = "--nnodes", "--nproc-per-node"
    count = reader.integer(local, COUNT, setting="mesh")
    machines = reader.integer(nodes, COUNT, setting="mesh") or 1
    source = ""
    if count is None:
        reader.take_part(nodes, f"ranks are not counted by it without {local}")
    else:
        ranks, source = machines * count, reader.where(nodes, local)
        if context.ranks not in (None, ranks):
            reader.conflict(
                f"{nodes} x {local} = {machines} x {count} = {ranks}, but --ranks {context.ranks}",
                "mesh",
                f"{source}, --ranks {context.ranks}",
            )
            return 1
        context = replace(context, ranks=ranks)
        reader.take_part(nodes, f"ranks: {machines} x {count} = {ranks}")
        reader.take_part(local, f"ranks: {machines} x {count} = {ranks}")
    data = known_or_fewest_ranks(reader, context)
    _judge_data_parallel_size(reader, context, data.count if data else None)
    key = "--num-distributed-optimizer-instances"
    groups = reader.integer(key, COUNT, setting="mesh.dp_replicate") or 1
    if data is None:
        return 1
    if data.count % groups or (groups > 1 and not stage):
        reader.refuse(key, f"{groups} copies among {data.count} data ranks at stage {stage}")
        groups = 1
    else:
        reader.take_part(key, "copies of what is shared out: mesh.dp_replicate")
    data = replace(data, groups=groups, shards=shards_of_experts(context))
    set_data_mesh(reader, stage, replace(data, source=source or data.source))
    return data.count


def _judge_data_parallel_size(reader: KeyReader, context: ImportContext, data: int | None) -> None:
    key = "--data-parallel-size"
    if reader.has(key) and data is not None and reader.given[key] == data:
        reader.skip(key, f"Megatron-LM has no such flag; from the ranks follow as many: {data}")
    elif reader.has(key):
        degrees = " x ".join(str(context.degrees[axis]) for axis in ("tp", "pp", "cp"))
        follows = "" if data is None else f" = {data * context.model_ranks} / ({degrees}) = {data}"
        reader.refuse(
            key,
            f"Megatron-LM has no such flag: it is world / (tp x pp x cp){follows}",
            suggestions=() if data is None else (f"--ranks {data * context.model_ranks}",),
        )


def _read_buckets(reader: KeyReader, stage: int, gradients: int, ranks: int) -> None:
    key = "--ddp-bucket-size"
    elements = reader.integer(key, COUNT, setting="zero.bucket_bytes")
    if elements is not None and stage < 3 and ranks > 1:
        why = f"{elements} elements x {gradients} bytes"
        reader.set(key, "zero.bucket_bytes", elements * gradients, why)
    else:
        reader.skip(key, "a bucket is a unit at stage 3, and one data rank reduces nothing")


def _read_batch(reader: KeyReader, data: int) -> int | None:
    """Map the batch, and return its sequences; without a size there is one microbatch."""
    why = "sequences of one forward pass of a rank"
    micro = reader.take(MICRO, "batch.microbatch_sequences", COUNT, why)
    total = reader.integer(GLOBAL, COUNT, setting="batch.global_sequences")
    if total is not None:
        why = "sequences of one optimizer step"
        if micro and total % (micro * data) == 0:
            why += f": {total // (micro * data)} microbatches on each of {data} data ranks"
        reader.set(GLOBAL, "batch.global_sequences", total, why)
    elif micro is not None and not reader.has(GLOBAL):
        total = micro * data
        why = "one microbatch on each data rank"
        reader.set(GLOBAL, "batch.global_sequences", total, why, source=reader.where(MICRO))
    reader.take("--seq-length", "batch.sequence_length", COUNT, "tokens of a sequence")
    _read_documents(reader)
    return total


def _read_documents(reader: KeyReader) -> None:
    """Map whether attention crosses ends of documents; Megatron-LM says so in the mask it makes."""
    key = "--reset-attention-mask"
    if not reader.flag(key, setting="batch.documents"):
        reader.skip(key, "attention goes through all of a sequence")
    elif reader.has(_NO_MASK) and reader.given[_NO_MASK] is True:
        reader.skip(key, f"{_NO_MASK} leaves no mask to reset")
    else:
        reader.set(key, "batch.documents", "separate", "attention stays inside each document")


def _read_steps(reader: KeyReader, batch: int | None) -> int | None:
    steps = reader.take("--train-iters", "train.steps", COUNT, "optimizer steps")
    key = "--train-samples"
    samples = reader.integer(key, COUNT, setting="train.steps")
    if samples is not None and batch is None:
        reader.refuse(key, SAMPLES, suggestions=(f"{GLOBAL} N",), setting="train.steps")
    elif samples is not None and batch:
        steps = max(1, samples // batch)
        reader.set(key, "train.steps", steps, f"{samples} samples / {batch} of a step")
    return steps


def read_pipeline(reader: KeyReader, layers: int | None, context: ImportContext) -> None:
    """Map virtual stages and their schedule, and how layers are cut into stages."""
    pp = context.degrees["pp"]
    if reader.has(LAYOUT):
        _read_layout(reader, layers, pp)
        _read_group(reader, pp)
        return
    virtual = _read_virtual(reader, layers, pp)
    _read_group(reader, pp)
    _read_stages(reader, layers, pp, virtual)


def stages_of_layout(text: str) -> list[int] | None:
    """Return how many layers each stage of a layout has; None where it is none."""
    plain = re.sub(r"[\s,'\"]", "", text)
    plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda found: found[1] * int(found[2]), plain)
    plain = re.sub(r"([Et|mL])\*(\d{1,4})", lambda found: found[1] * int(found[2]), plain)
    stages = plain.split("|")
    whole = "".join(stages)
    if re.fullmatch(r"Et+L", whole) is None:
        return None
    return [stage.count("t") for stage in stages]


def _read_layout(reader: KeyReader, layers: int | None, pp: int) -> None:
    """Map a list of all stages, in the order of the model; it says how many a rank has, too."""
    for key in (_VIRTUAL_STAGES, _VIRTUAL_LAYERS, *ENDS, *_ACCOUNTS):
        if reader.has(key):
            reader.refuse(key, f"{LAYOUT} says it already", setting=STAGES)
    sizes = stages_of_layout(str(reader.given[LAYOUT]))
    if sizes is None:
        why = "stages of E (embedding), t (layer) and L (loss), in this order, parted by |"
        reader.refuse(LAYOUT, why, suggestions=(f'{LAYOUT} "Et*2|t*2|t*2|t*2L"',), setting=STAGES)
    elif len(sizes) % pp or layers not in (None, sum(sizes)):
        why = f"{len(sizes)} stages on {pp} ranks, with {sum(sizes)} of {layers} layers"
        reader.refuse(LAYOUT, why, setting=STAGES)
    else:
        _set_sizes(reader, sizes, [LAYOUT])
        if (virtual := len(sizes) // pp) > 1:
            reader.set(LAYOUT, VIRTUAL, virtual, "stages of a pipeline rank")
            why = "a rank with several stages interleaves them"
            reader.set(LAYOUT, SCHEDULE, INTERLEAVED, why)


def _read_virtual(reader: KeyReader, layers: int | None, pp: int) -> int:
    source_key = _VIRTUAL_STAGES
    virtual = reader.take(source_key, VIRTUAL, COUNT, "stages of a pipeline rank") or 1
    size = reader.integer(_VIRTUAL_LAYERS, COUNT, setting=VIRTUAL)
    if size is not None and layers:
        if layers % (pp * size):
            reader.refuse(
                _VIRTUAL_LAYERS, f"{layers} layers / (pp {pp} x {size}) is no whole number"
            )
        else:
            virtual, source_key = layers // (pp * size), _VIRTUAL_LAYERS
            why = f"layers / (pp x layers of a virtual stage) = {layers} / ({pp} x {size})"
            reader.set(_VIRTUAL_LAYERS, VIRTUAL, virtual, why)
    if virtual > 1:
        why = "a rank with several stages interleaves them"
        reader.set(source_key, SCHEDULE, INTERLEAVED, why)
    return virtual


def _read_group(reader: KeyReader, pp: int) -> None:
    size = reader.integer(_GROUP, COUNT)
    if size == pp:
        reader.skip(_GROUP, f"interleaved-1f1b has groups of pp = {pp} microbatches")
    elif size is not None:
        reader.refuse(
            _GROUP, f"groups are of pp = {pp} microbatches", suggestions=(f"{_GROUP} {pp}",)
        )


def _read_stages(reader: KeyReader, layers: int | None, pp: int, virtual: int) -> None:
    """Map the layers of the first and the last stage, or what counts as one there; else even."""
    first, last = (reader.integer(key, COUNT, setting=STAGES) for key in ENDS)
    counted = [bool(reader.flag(key, setting=STAGES)) for key in _ACCOUNTS]
    given = [key for key in ENDS if reader.has(key)]
    as_layers = [key for key, on in zip(_ACCOUNTS, counted, strict=True) if on]
    if not layers or len(given) > sum(n is not None for n in (first, last)):
        return
    if not given and not as_layers:
        if pp > 1:
            why = "layers are cut evenly"
            reader.set(ENDS[0], STAGES, "even", why, source=reader.default)
        return
    if given and as_layers:
        reader.refuse(as_layers[0], f"{given[0]} says it already")
        return
    stages = pp * virtual
    if as_layers:
        size, rest = divmod(layers + len(as_layers), stages)
        if rest:
            reader.refuse(
                as_layers[0],
                f"{layers} layers + {len(as_layers)} are no multiple of {stages} stages",
            )
            return
        sizes = [size] * stages
        sizes[0] -= counted[0]
        sizes[-1] -= counted[1]
        given = as_layers
    else:
        # With virtual stages the two numbers are those of the first and the last rank's.
        middle, rest = pp - len(given), layers - (first or 0) - (last or 0)
        if virtual > 1:
            reader.refuse(given[0], "the split over virtual stages is listed in pipeline.stages")
            return
        if middle <= 0 or rest <= 0 or rest % middle:
            reader.refuse(given[-1], f"{rest} layers are left for {middle} stages between")
            return
        sizes = [n for n in (first, *[rest // middle] * middle, last) if n]
    _set_sizes(reader, sizes, given)


def _set_sizes(reader: KeyReader, sizes: list[int], given: list[str]) -> None:
    why = f"layers of each stage: {', '.join(map(str, sizes))}"
    reader.set(given[-1], STAGES, blocks_of_stages(sizes), why, source=reader.where(*given))
    reader.skip_all(given[:-1], f"together with {given[-1]}")
