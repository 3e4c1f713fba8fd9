"""Which rules the controls of the explorer break, with their arithmetic: compiled for the page.

The rules themselves are finders over the settings of a run (`config/rules/`). These are what the
finders come to for settings that the page can make, in their order: a test asks both of random
settings, and they must name the same rules (tests/page/explorer/test_rules.py). Context ranks and
the lengths of sequences are powers of two in the page (`tables.py`), so that every rank gets an
equal part of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.core.model_shape import ModelShape
from echelon.core.rulebook.batch import BATCH_DIVIDES, SEQUENCE_FITS_POSITIONS
from echelon.core.rulebook.config import NO_EFFECT
from echelon.core.rulebook.context import ULYSSES_DIVIDES_HEADS
from echelon.core.rulebook.expert_parallel import (
    EP_DIVIDES_EXPERTS,
    EP_DIVIDES_RANKS,
    TP_DIVIDES_TOKENS,
)
from echelon.core.rulebook.mesh import (
    FITS_CLUSTER,
    SEQUENCE_PARALLEL_DIVIDES_SEQUENCE,
    TP_DIVIDES_FFN,
    TP_DIVIDES_HEADS,
    TP_DIVIDES_KV_HEADS,
)
from echelon.core.rulebook.pipeline import LAYERS_FILL_STAGES
from echelon.core.rulebook.schedule import (
    SCHEDULE_EVEN_MICROBATCHES,
    SCHEDULE_EVEN_RANKS,
    SCHEDULE_NEEDS_MICROBATCHES,
    SCHEDULE_STAGES_PER_RANK,
)
from echelon.core.rulebook.zero import ZERO_SHARES_OUT
from echelon.page.explorer.inputs import Controls, Record, model_shape

PLAIN_KIND = "ring"
"""How context ranks meet where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Say which rule the controls break, and the arithmetic."""

    rule: str
    message: str


def broken_rules(
    tables: Record, controls: Controls, model: Record, cluster: Record
) -> list[Broken]:
    """Return the rules that a run of the controls breaks; none where it can be planned."""
    shape = model_shape(model["shape"])
    return [
        *_tensor(controls, shape),
        *_batch(controls, shape),
        *_pipeline(tables, controls, shape),
        *_zero(controls, shape),
        *_context(tables, controls, shape),
        *_experts(controls, shape),
        *_devices(controls, cluster),
    ]


def _cut(rule: str, degree: int, what: str, count: int) -> Iterator[Broken]:
    if count % degree:
        yield Broken(
            rule=rule,
            message=f"tp = {degree}, but the model has {what} = {count} "
            f"({count} % {degree} = {count % degree})",
        )


def _tensor(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    tp, experts = controls.tp, shape.experts
    yield from _cut(TP_DIVIDES_HEADS.id, tp, "heads", shape.heads)
    yield from _cut(TP_DIVIDES_KV_HEADS.id, tp, "kv_heads", shape.kv_heads)
    if shape.has_dense_blocks:
        yield from _cut(TP_DIVIDES_FFN.id, tp, "ffn", shape.ffn)
    if experts is not None and experts.shared_experts > 0:
        width = experts.shared_experts * experts.ffn
        yield from _cut(TP_DIVIDES_FFN.id, tp, "shared_experts x experts.ffn", width)


def _batch(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    length, tp, cp = controls.length, controls.tp, controls.cp
    if controls.sequence_parallel and length % (cp * tp):
        yield Broken(
            rule=SEQUENCE_PARALLEL_DIVIDES_SEQUENCE.id,
            message=f"a sequence of {length} is not a multiple of cp x tp = {cp * tp} "
            f"({length} % {cp * tp} = {length % (cp * tp)}), and sequence parallelism cuts it",
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
            f"= {size} x {dp} = {size * dp} "
            f"({controls.sequences} % {size * dp} = {controls.sequences % (size * dp)})",
        )


def _pipeline(tables: Record, controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    pp, virtual, name = controls.pp, controls.virtual, controls.schedule
    share = controls.microbatch * controls.dp_replicate * controls.dp_shard
    facts: Any = tables["schedule_facts"][name]
    # Of a batch that does not come out even nothing is said of its microbatches.
    if controls.sequences % share == 0:
        count = controls.sequences // share
        if facts["even_ranks"] and pp % 2:
            yield Broken(
                rule=SCHEDULE_EVEN_RANKS.id,
                message=f"{name} pairs each rank with its mirror image, but pp = {pp} is odd",
            )
        elif virtual >= len(facts["virtual"]) or not facts["virtual"][virtual]:
            yield Broken(
                rule=SCHEDULE_STAGES_PER_RANK.id,
                message=f"{name} places {facts['places']}, but there are {pp * virtual} stages for "
                f"{pp} ranks",
            )
        multiple = facts["multiple"]
        least = max(1, facts["per_rank"] * pp)
        if count < least:
            yield Broken(
                rule=SCHEDULE_NEEDS_MICROBATCHES.id,
                message=f"{name} needs at least {least} microbatches on {pp} ranks, but a step has "
                f"{count}",
            )
        elif count % multiple:
            yield Broken(
                rule=SCHEDULE_EVEN_MICROBATCHES.id,
                message=f"{name} lets half of the microbatches enter at each end, but a step has "
                f"{count} ({count} % {multiple} = {count % multiple})",
            )
    if shape.layers < pp * virtual:
        yield Broken(
            rule=LAYERS_FILL_STAGES.id,
            message=f"pp x stages of a rank = {pp} x {virtual} = {pp * virtual} stages, but the "
            f"model has {shape.layers} blocks",
        )


def _zero(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    if controls.tp == 1 and controls.sequence_parallel:
        yield Broken(rule=NO_EFFECT.id, message="sequence parallelism splits over tp, and tp = 1")
    shard, cp = controls.dp_shard, controls.cp
    if controls.zero > 0 and shard * cp == 1:
        yield Broken(
            rule=ZERO_SHARES_OUT.id,
            message=f"ZeRO {controls.zero} shares out over dp_shard x cp = {shard} x {cp} = 1 rank",
        )
    # Where experts take more ranks than cp and tp have, dp_shard shares them out.
    used = shape.experts is not None and (cp * controls.tp) % controls.ep > 0
    if controls.zero == 0 and shard > 1 and not used:
        yield Broken(
            rule=NO_EFFECT.id,
            message=f"dp_shard = {shard} changes nothing: ZeRO 0 shares nothing out; whole "
            "replicas are dp_replicate",
        )


def _context(tables: Record, controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    cp, kind = controls.cp, controls.context
    if tables["context_kinds"][kind]["exchanges_heads"] and shape.heads % controls.tp == 0:
        heads = shape.heads // controls.tp
        if heads % cp:
            yield Broken(
                rule=ULYSSES_DIVIDES_HEADS.id,
                message=f"{kind} shares out heads among cp = {cp} ranks, but heads / tp = "
                f"{shape.heads} / {controls.tp} = {heads} ({heads} % {cp} = {heads % cp})",
            )
    if cp == 1 and kind != PLAIN_KIND:
        yield Broken(rule=NO_EFFECT.id, message=f"{kind} is how cp works, and cp = 1")


def _experts(controls: Controls, shape: ModelShape) -> Iterator[Broken]:
    ep, experts = controls.ep, shape.experts
    if experts is None:
        if ep > 1:
            yield Broken(rule=NO_EFFECT.id, message=f"ep = {ep}, but the model has no experts")
        return
    count = experts.num_experts
    if count % ep:
        yield Broken(
            rule=EP_DIVIDES_EXPERTS.id,
            message=f"ep = {ep}, but the model has {count} experts ({count} % {ep} = {count % ep})",
        )
    ranks = controls.dp_shard * controls.cp * controls.tp
    if ranks % ep:
        yield Broken(
            rule=EP_DIVIDES_RANKS.id,
            message=f"ep = {ep} does not divide dp_shard x cp x tp = {ranks}, the ranks that share "
            f"out experts ({ranks} % {ep} = {ranks % ep})",
        )
    tokens = controls.microbatch * (controls.length // controls.cp)
    if tokens % controls.tp and not controls.sequence_parallel:
        yield Broken(
            rule=TP_DIVIDES_TOKENS.id,
            message=f"tp = {controls.tp}, but a microbatch has {tokens} tokens on a rank "
            f"({tokens} % {controls.tp} = {tokens % controls.tp})",
        )


def _devices(controls: Controls, cluster: Record) -> Iterator[Broken]:
    if controls.ranks > cluster["devices"]:
        yield Broken(
            rule=FITS_CLUSTER.id,
            message=f"the mesh has {controls.ranks} ranks, but {cluster['name']} has "
            f"{cluster['devices']} devices",
        )


def run_text(controls: Controls, model: Record, cluster: Record) -> str:
    """Return the run file of the controls, as TOML."""
    # What has no effect must not be said.
    context = f'\n[context]\nkind = "{controls.context}"\n' if controls.cp > 1 else ""
    split = "sequence_parallel = true\n" if controls.sequence_parallel else ""
    return (
        f'[model]\npreset = "{model["name"]}"\n\n'
        f'[cluster]\npreset = "{cluster["name"]}"\n\n'
        f"[mesh]\npp = {controls.pp}\ndp_replicate = {controls.dp_replicate}\n"
        f"dp_shard = {controls.dp_shard}\ncp = {controls.cp}\ntp = {controls.tp}\n"
        f"ep = {controls.ep}\n{split}\n"
        f"[zero]\nstage = {controls.zero}\n"
        + ('reshard_after_forward = "always"\n' if controls.zero == 3 else "")
        + f'\n[pipeline]\nschedule = "{controls.schedule}"\n'
        f"virtual_stages = {controls.virtual}\n\n"
        f"[batch]\nglobal_sequences = {controls.sequences}\n"
        f"microbatch_sequences = {controls.microbatch}\nsequence_length = {controls.length}\n\n"
        f'[recompute]\npolicy = "{controls.recompute}"\n{context}'
    )
