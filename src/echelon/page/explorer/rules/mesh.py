# SPDX-License-Identifier: Apache-2.0
"""What tensor ranks, data ranks, servers and devices need of the model and of each other."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.mesh import (
    BATCH_DIVIDES,
    FITS_CLUSTER,
    SEQUENCE_FITS_POSITIONS,
    SEQUENCE_PARALLEL_DIVIDES_SEQUENCE,
    SYMMETRIC_MEMORY_REACHES_RANKS,
    TP_DIVIDES_FFN,
    TP_DIVIDES_HEADS,
    TP_DIVIDES_KV_HEADS,
)
from echelon.core.rulebook.servers import (
    SERVERS_HOLD_DENSE_MODELS,
    SERVERS_SPLIT_SAMPLES,
    SERVERS_UPDATE_ELEMENTS,
)
from echelon.page.explorer.controls import PRECISIONS, Controls, Record
from echelon.page.explorer.rules.broken import Broken, rest_text, without_effect
from echelon.page.explorer.rules.context import cuts_groups


def _cut(rule: str, degree: int, what: str, count: int) -> Iterator[Broken]:
    if count % degree:
        yield Broken(
            rule=rule,
            message=f"tp = {degree}, but the model has {what} = {count} "
            f"({rest_text(count, degree)})",
        )


def broken_by_tensor_ranks(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield what tensor ranks can't cut evenly."""
    tp, experts = controls.tp, shape.experts
    yield from _cut(TP_DIVIDES_HEADS.id, tp, "heads", shape.heads)
    yield from _cut(TP_DIVIDES_KV_HEADS.id, tp, "kv_heads", shape.kv_heads)
    if shape.has_dense_blocks:
        yield from _cut(TP_DIVIDES_FFN.id, tp, "ffn", shape.ffn)
    if experts is not None and experts.shared_experts > 0:
        width = experts.shared_experts * experts.ffn
        yield from _cut(TP_DIVIDES_FFN.id, tp, "shared_experts x experts.ffn", width)


def broken_by_batch(tables: Record, controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield what a sequence, and the sequences of a step, break."""
    length, parts = controls.length, controls.cp * controls.tp
    if controls.sequence_parallel and length % parts and cuts_groups(tables, controls):
        yield Broken(
            rule=SEQUENCE_PARALLEL_DIVIDES_SEQUENCE.id,
            message=f"a sequence of {length} is not a multiple of cp x tp = {parts} "
            f"({rest_text(length, parts)}), and sequence parallelism cuts it",
        )
    if length > shape.max_positions:
        yield Broken(
            rule=SEQUENCE_FITS_POSITIONS.id,
            message=f"a sequence has {length} tokens, but the model has {shape.max_positions} "
            "positions",
        )
    size, dp = controls.microbatch, controls.dp_replicate * controls.dp_shard
    if controls.sequences % (size * dp):
        yield Broken(
            rule=BATCH_DIVIDES.id,
            message=f"{controls.sequences} sequences are not a multiple of microbatch x data ranks "
            f"= {size} x {dp} = {size * dp} ({rest_text(controls.sequences, size * dp)})",
        )


def broken_by_overlap(controls: Controls, cluster: Record) -> Iterator[Broken]:
    """Yield what an overlap over tensor ranks lacks, and sequence parallelism without them."""
    tp, kind, domain = controls.tp, controls.tp_overlap, cluster["fast_domain"]
    yield from without_effect(
        tp == 1 and controls.sequence_parallel,
        "sequence parallelism splits over tp, and tp = 1",
    )
    if kind == "none":
        return
    if kind == "symmetric-memory" and (not cluster["gpus"] or domain % tp):
        why = f"tp = {tp} spans what fast links join ({rest_text(domain, tp)})"
        if not cluster["gpus"]:
            why = f"the devices of {cluster['name']} are no GPUs"
        yield Broken(rule=SYMMETRIC_MEMORY_REACHES_RANKS.id, message=f"{kind}, but {why}")
    yield from without_effect(tp == 1, f"{kind} is about messages between tensor ranks, and tp = 1")
    yield from without_effect(
        tp > 1 and not controls.sequence_parallel,
        f"{kind} is about rows that sequence parallelism gathers and scatters",
    )


def broken_by_servers(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    """Yield what parameter servers can't have beside them."""
    count, told = controls.servers, f"servers = {controls.servers}"
    if count == 0:
        return
    degrees = {
        "pp": controls.pp,
        "dp_shard": controls.dp_shard,
        "cp": controls.cp,
        "tp": controls.tp,
        "ep": controls.ep,
    }
    cuts = [f"{name} = {degree}" for name, degree in degrees.items() if degree > 1]
    if controls.zero > 0:
        cuts.append(f"ZeRO {controls.zero}")
    if cuts:
        yield Broken(
            rule=SERVERS_SPLIT_SAMPLES.id,
            message=f"{told}, and {' and '.join(cuts)} cut the model of a worker",
        )
    if controls.optimizer == "muon":
        yield Broken(
            rule=SERVERS_UPDATE_ELEMENTS.id,
            message=f"muon updates whole matrices, and {told} holds ranges of elements",
        )
    if shape.experts is not None:
        yield Broken(
            rule=SERVERS_HOLD_DENSE_MODELS.id,
            message=f"{told}, and the model has experts, whose routers have state of their own",
        )
    if PRECISIONS[controls.precision].has_tensor_scales:
        yield Broken(
            rule=SERVERS_HOLD_DENSE_MODELS.id,
            message=f"{told}, and scales of whole tensors keep the largest numbers of steps before",
        )


def broken_by_devices(controls: Controls, cluster: Record) -> Iterator[Broken]:
    """Yield more ranks than there are devices."""
    if controls.ranks > cluster["devices"]:
        yield Broken(
            rule=FITS_CLUSTER.id,
            message=f"the mesh has {controls.ranks} ranks, but {cluster['name']} has "
            f"{cluster['devices']} devices",
        )
