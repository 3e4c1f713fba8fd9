"""The splits that a row can mean: one where it says all; else each choice of what it leaves blank.

Frameworks' tables report the best setting that they found; so of a blank microbatch, number of
chunks, recompute policy or degree, all usual values are candidates, and `predict.py` takes the
fastest that fits. Recompute is a share of blocks that run forward again, or their attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

from bench.accuracy.published.memory_settings import offloaded
from bench.accuracy.published.programs import Program
from bench.accuracy.published.rows import Refused, Row
from echelon.core.rulebook.config import MISSING_SETTING
from echelon.core.rulebook.mesh import BATCH_DIVIDES, WORLD_SIZE_IS_PRODUCT
from echelon.cost.inputs.numbers import LayoutNumbers, ModelNumbers
from echelon.cost.inputs.pipeline import schedule_index

MICROBATCHES = (1.0, 2.0, 4.0, 8.0)
DEGREES = (1.0, 2.0, 4.0, 8.0)
EXPERT_DEGREES = (1, 2, 4, 8, 16, 32, 64)
MOST_CANDIDATES = 600
MOST_STAGES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Hold one split, and what was chosen in it of what the row leaves blank."""

    layout: LayoutNumbers
    chosen: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    tp: float
    pp: float
    cp: float
    dp: float


def candidates_of(row: Row, model: ModelNumbers, program: Program) -> list[Candidate]:
    """Return every split that a row can mean, at least one; Refused where there is none."""
    batch = sequences_of(row, model)
    found: list[Candidate] = []
    for degrees in _degrees(row, model, program):
        batch_here = batch
        if batch_here is None:
            batch_here = row.assume("global_batch", 8.0 * degrees.dp, "8 sequences a replica")
        for microbatch in _microbatches(row, batch_here, degrees.dp):
            count = math.ceil(batch_here / degrees.dp / microbatch)
            for chunks, policy, ep in product(
                _chunks(row, model, degrees, count, program),
                _policies(row, program, cast(float, model.layers) / degrees.pp),
                _expert_degrees(row, model, degrees),
            ):
                rest = (microbatch, count, chunks, policy)
                layout = replace(_layout(row, model, program, degrees, rest), ep=ep)
                found.append(_candidate(row, model, layout, policy))
    if not found:
        raise Refused(BATCH_DIVIDES, f"no microbatch divides {batch:g} sequences")
    return found[:: math.ceil(len(found) / MOST_CANDIDATES)]


def sequences_of(row: Row, model: ModelNumbers) -> float | None:
    """Return the sequences of a step, which a row can give in tokens."""
    if "tok" not in row.word("global_batch").lower():
        return row.count("global_batch")
    tokens = row.positive("global_batch") or 0.0
    return float(max(1, round(tokens / cast(float, model.length))))


def _degrees(row: Row, model: ModelNumbers, program: Program) -> Iterator[_Degrees]:
    tp, pp, dp, devices = (row.count(name) for name in ("tp", "pp", "dp", "n_gpus"))
    cp = _context(row, (tp or 1.0) * (pp or 1.0), devices)
    if devices is None:
        if dp is None:
            raise Refused(MISSING_SETTING, "n_gpus and dp are blank")
        tp, pp = tp or 1.0, pp or 1.0
        row.say("n_gpus", tp * pp * cp * dp, "tp x cp x pp x dp")
        yield _Degrees(tp=tp, pp=pp, cp=cp, dp=dp)
        return
    if tp is not None and pp is not None:
        yield _whole(row, _Degrees(tp=tp, pp=pp, cp=cp, dp=dp or 0.0), devices)
        return
    # A trainer that cuts parameters has no other axis, unless a row says so.
    alone = program.zero >= 3.0 and dp in (None, devices)
    tensors = [tp] if tp else ([1.0] if alone else DEGREES)
    stages = [pp] if pp else ([1.0] if alone else _stages(model, devices))
    all_fit = [
        _Degrees(tp=one, pp=many, cp=cp, dp=devices / (one * many * cp))
        for one, many in product(tensors, stages)
        if devices % (one * many * cp) == 0 and (tp or not model.heads % one)
    ]
    found = [one for one in all_fit if dp in (None, one.dp)]
    if not found and all_fit:
        row.say("dp", "other", f"{dp:g} with no usual tp and pp makes {devices:g} devices")
    if not all_fit:
        raise Refused(WORLD_SIZE_IS_PRODUCT, f"no blank degrees make {devices:g} devices")
    yield from found or all_fit


def _context(row: Row, model_part: float, devices: float | None) -> float:
    """Return the context degree; 1 where it is no factor of the devices, but the rest is."""
    cp = row.count("cp") or 1.0
    if devices and devices % (model_part * cp) and not devices % model_part:
        return row.assume("cp", 1.0, f"{cp:g} x tp x pp = {cp * model_part:g} is no part of n_gpus")
    return cp


def _stages(model: ModelNumbers, devices: float) -> list[float]:
    return [n for n in divisors(cast(float, model.layers)) if devices % n == 0]


def divisors(number: float) -> list[float]:
    """Return the divisors of a whole number, up to the most stages that a pipeline has."""
    return [float(n) for n in range(1, int(min(number, MOST_STAGES)) + 1) if number % n == 0]


def _whole(row: Row, degrees: _Degrees, devices: float) -> _Degrees:
    """Return degrees whose product is the number of devices."""
    model_part = degrees.tp * degrees.pp * degrees.cp
    if degrees.dp * model_part == devices:
        return degrees
    rest = devices / model_part
    if rest != int(rest):
        raise Refused(
            WORLD_SIZE_IS_PRODUCT,
            f"{devices:g} devices are no multiple of tp x pp x cp = {model_part:g}",
        )
    why = "n_gpus / (tp x pp x cp)"
    if degrees.dp:
        why += f"; the row's {degrees.dp:g} makes {degrees.dp * model_part:g} devices"
    row.assume("dp", rest, why)
    return _Degrees(tp=degrees.tp, pp=degrees.pp, cp=degrees.cp, dp=rest)


def _microbatches(row: Row, batch: float, dp: float) -> list[float]:
    given = row.count("micro_batch")
    share = batch / dp
    if given is not None:
        if share % given:
            row.say("micro_batch", given, f"{share:g} sequences a replica: the last is not full")
        return [min(given, share) if share >= 1.0 else given]
    return [size for size in MICROBATCHES if share % size == 0] or [min(1.0, share)]


def _chunks(
    row: Row, model: ModelNumbers, degrees: _Degrees, count: int, program: Program
) -> list[float]:
    """Return the virtual stages of a pipeline rank that a row can mean."""
    given, schedule = row.count("vpp"), row.word("schedule").lower()
    if degrees.pp == 1.0:
        return [1.0]
    on_rank = math.ceil(model.layers / degrees.pp)
    if given is not None:
        return [min(given, float(on_rank))]
    interleaves = "interleaved" in schedule or (not schedule and program.interleaves)
    if not interleaves or count % degrees.pp:
        return [1.0]
    if program.generation.startswith("fsdp"):
        return [2.0] if on_rank > 1 else [1.0]
    least = 1 if re.search(r"\bor\b|not stated", schedule) or not schedule else 2
    return [n for n in divisors(on_rank) if n >= least] or [1.0]


def _policies(row: Row, program: Program, on_rank: float) -> list[Recompute]:
    text = row.word("recompute")
    if text:
        cuts = program.generation.startswith("fsdp")
        return recomputes_of(text, on_rank, cuts_parameters=cuts)
    if "titan" in row.word("framework").lower():
        # Its configurations say so (torchtitan/models/llama3/train_configs).
        return [PER_OP, FULL]
    # Programs compiled as a whole keep inputs of layers only, unless told otherwise.
    free = program.fused and program.generation != "jax"
    return [NO_RECOMPUTE, QUARTER, HALF, FULL] if free else [FULL]


def _layout(
    row: Row,
    model: ModelNumbers,
    program: Program,
    degrees: _Degrees,
    rest: tuple[float, int, float, Recompute],
) -> LayoutNumbers:
    microbatch, count, chunks, policy = rest
    zero = program.zero
    if zero >= 3.0 and degrees.pp > 1.0 and program.generation.startswith("fsdp"):
        # Under a pipeline FSDP gathers once a step, and scatters once: what stage 1 does.
        zero = 1.0
    sequence = row.flag("sp")
    if sequence is None:
        sequence = program.sequence_parallel and degrees.tp > 1.0
    shard, replicate = _sharded(row, degrees.dp, zero)
    kind = row.word("cp_kind").lower()
    return LayoutNumbers(
        tp=degrees.tp,
        cp=degrees.cp,
        pp=degrees.pp,
        dp_shard=shard,
        dp_replicate=replicate,
        expert_tp=(row.count("etp") or 1.0) if model.experts else 1.0,
        sequence_parallel=float(sequence and degrees.tp > 1.0),
        ulysses=degrees.cp if "ulysses" in kind or "a2a" in kind else 1.0,
        gathered=float("gather" in kind),
        microbatch=microbatch,
        microbatches=float(count),
        virtual=chunks,
        schedule=schedule_index(_schedule(row, chunks)),
        zero=zero,
        recompute=policy.share,
        selective=policy.selective,
        per_op=policy.per_op,
        offload=float(offloaded(row, "optimizer_offload")),
        parameter_offload=float(offloaded(row, "parameter_offload")),
    )


def _sharded(row: Row, dp: float, zero: float) -> tuple[float, float]:
    """Return over how many replicas ZeRO cuts, and how often that is repeated."""
    text = f"{row.word('framework')} {row.word('zero_stage')}".lower()
    hybrid = re.search(r"hsdp|hybrid", text) is not None
    per_node = row.count("gpus_per_node") or 8.0
    if hybrid and zero and dp > per_node and dp % per_node == 0:
        row.say("zero_stage", zero, f"hybrid sharding cuts over a node of {per_node:g}")
        return per_node, dp / per_node
    return dp, 1.0


def _expert_degrees(row: Row, model: ModelNumbers, degrees: _Degrees) -> list[float]:
    """Return the degrees of expert parallelism that a row can mean: its own, or each usual one."""
    if not model.experts:
        return [1.0]
    ranks = degrees.tp * degrees.cp * degrees.dp
    given = row.count("ep")
    if given is not None:
        if given > ranks:
            row.say("ep", ranks, f"{given:g} is above the {ranks:g} ranks of a stage")
        return [min(given, ranks)]
    usual = [float(n) for n in EXPERT_DEGREES if model.experts % n == 0 and ranks % n == 0]
    return usual or [1.0]


def _schedule(row: Row, chunks: float) -> str:
    text = re.sub(r"[^a-z0-9]", "", row.word("schedule").lower())
    for name in ("dualpipe-v", "dualpipe", "zb-v", "zb-h2", "zb-h1", "breadth-first", "gpipe"):
        if name.replace("-", "") in text:
            return name
    if "zerobubble" in text or "afab" in text:
        return "zb-h1" if "zero" in text else "gpipe"
    return "interleaved-1f1b" if chunks > 1.0 else "1f1b"


def _candidate(
    row: Row, model: ModelNumbers, layout: LayoutNumbers, policy: Recompute
) -> Candidate:
    settings: tuple[tuple[str, object], ...] = (
        ("tp", layout.tp),
        ("pp", layout.pp),
        ("dp", layout.dp),
        ("ep", layout.ep),
        ("micro_batch", layout.microbatch),
        ("vpp", layout.virtual),
        ("recompute", policy.name),
        ("sp", bool(layout.sequence_parallel)),
    )
    needless = {"vpp", "pp"} if layout.pp == 1.0 and row.word("tp") else set[str]()
    needless |= set() if cast(float, model.experts) else {"ep"}
    return Candidate(
        layout=layout,
        chosen=tuple(
            pair for pair in settings if not row.word(pair[0]) and pair[0] not in needless
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Give a policy: the share of blocks that run forward again, or their attention only."""

    name: str
    share: float
    selective: float
    per_op: float = 0.0
    """Flag: blocks keep attention and every second product (torchtitan)."""


NO_RECOMPUTE = Recompute(name="none", share=0.0, selective=0.0)
SELECTIVE = Recompute(name="selective", share=0.0, selective=1.0)
QUARTER = Recompute(name="full, every 4", share=0.25, selective=0.0)
HALF = Recompute(name="full, every 2", share=0.5, selective=0.0)
MOST = Recompute(name="full, 3 of 4", share=0.75, selective=0.0)
FULL = Recompute(name="full", share=1.0, selective=0.0)
PER_OP = Recompute(name="selective (per-op)", share=0.5, selective=0.0, per_op=1.0)
NONE_WORDS = ("none", "no", "false", "off", "0", "n", "disabled", "without")


def recomputes_of(text: str, on_rank: float, *, cuts_parameters: bool) -> list[Recompute]:
    """Return the policies that a text can mean, of a rank of so many layers; it is not blank.

    To trainers that cut parameters "selective" means some blocks, as many as must be.
    """
    lower = text.lower()
    if re.split(r"[\s(,;]", lower)[0] in NONE_WORDS:
        return [NO_RECOMPUTE]
    share = _share(lower, on_rank)
    if share is not None:
        return [Recompute(name=lower, share=min(1.0, max(0.0, share)), selective=0.0)]
    if lower.startswith("selective"):
        if "other" in lower or "per-op" in lower:
            return [Recompute(name=lower, share=0.5, selective=0.0, per_op=1.0)]
        return [QUARTER, HALF, MOST] if cuts_parameters else [SELECTIVE]
    return [SELECTIVE] if "attn" in lower or "attention" in lower else [FULL]


def _share(text: str, on_rank: float) -> float | None:
    """Return the share of blocks that a text gives: in percent, as a part, or of so many layers."""
    percent = re.search(r"(\d+(?:\.\d+)?)\s*%", text)
    if percent:
        return float(percent[1]) / 100.0
    part = re.search(r"([1-9]\d*)\s*(?:of|/)\s*([1-9]\d*)", text)
    if part:
        return float(part[1]) / float(part[2])
    if re.search(r"every[\s-]*other", text) and not text.startswith("selective"):
        return 0.5
    every = re.search(r"every[\s-]*(?:n=)?([1-9]\d*)", text)
    if every:
        return 1.0 / float(every[1])
    if re.fullmatch(r"0?\.\d+", text):
        return float(text)
    counted = re.search(r"(\d+)\s*(?:layer|block)s?\b", text)
    # Megatron's method "block" does so many blocks of a rank; "uniform" does all, in such groups.
    counted = counted or re.search(r"block\W*(\d+)|^(\d+)$", text)
    if counted and not text.startswith("selective"):
        count = next(one for one in counted.groups() if one)
        return float(count) / on_rank
    return None
