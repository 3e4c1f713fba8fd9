# SPDX-License-Identifier: Apache-2.0
"""The words of a plan on a page, each with the meaning of its sign for the legend.

Tables and legend read the same words: a table explains the signs that it prints, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.core.units import gib
from echelon.planner.predict.estimate import Estimate
from echelon.planner.search.candidate import CandidatePlan
from echelon.planner.search.options import MOST_STAGE
from echelon.schedule.build import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWord:
    """Hold a word of a plan as it is printed, such as ``tp8s``.

    `signs` are its parts that need a legend, each with a meaning: ``tpNs``.
    """

    text: str
    signs: tuple[tuple[str, str], ...] = ()


def mesh_words(choice: CandidatePlan) -> tuple[PlanWord, ...]:
    """Return the degrees of a mesh that are not 1, such as ``pp16 dp2x32 tp8s``."""
    mesh = choice.mesh
    words = [PlanWord(text=f"pp{mesh.pp}")] if mesh.pp > 1 else []
    words += [_data_word(choice)] if mesh.dp > 1 else []
    words += [_context_word(choice)] if mesh.cp > 1 else []
    if mesh.tp > 1:
        words.append(_with_suffix("tp", mesh.tp, "s" * choice.sequence_parallel))
    if mesh.ep > 1:
        words.append(_with_suffix("ep", mesh.ep, "t" * (choice.expert_tp > 1)))
    return tuple(words) or (PlanWord(text="one rank"),)


def zero_word(choice: CandidatePlan, name: str = "") -> PlanWord:
    """Return the ZeRO stage behind a `name`, with its signs: ``3+s``."""
    kept_whole = choice.zero == MOST_STAGE and not choice.reshard
    has = {"+k": kept_whole, "+s": choice.keeps_slices, "+h": choice.offload}
    signs = tuple((sign, _ZERO_SIGNS[sign]) for sign, is_there in has.items() if is_there)
    return PlanWord(text=f"{name}{choice.zero}" + "".join(sign for sign, _ in signs), signs=signs)


def schedule_word(choice: CandidatePlan) -> PlanWord:
    """Return the schedule of a plan in ten columns; "-" without a pipeline."""
    if choice.mesh.pp == 1:
        return PlanWord(text="-")
    short = SCHEDULES[choice.schedule].short_name
    if not short:
        return PlanWord(text=choice.schedule)
    sign = (f"{short} xV", f"{choice.schedule}, V stages on a rank")
    return PlanWord(text=f"{short} x{choice.virtual}", signs=(sign,))


def recompute_word(choice: CandidatePlan) -> PlanWord:
    """Recompute of a plan: "-", first letters of operators, "all", or ``1/K`` of the blocks."""
    operators = tuple((name[:2], name) for name in choice.operators)
    letters = "".join(sign for sign, _ in operators)
    if choice.recompute == 0:
        return PlanWord(text=letters or "-", signs=operators)
    blocks = "all" if choice.recompute == 1 else f"1/{choice.recompute}"
    sign = ("all", "every block") if choice.recompute == 1 else ("1/K", "one of K blocks")
    text = f"{blocks}+{letters}" if letters else blocks
    return PlanWord(text=text, signs=(sign, *operators))


def plan_cells(choice: CandidatePlan) -> tuple[tuple[PlanWord, ...], ...]:
    """Return all choices of a plan as cells: mesh, zero, schedule, microbatch, recompute."""
    return (
        mesh_words(choice),
        (zero_word(choice), *_rounding_words(choice)),
        (schedule_word(choice),),
        (PlanWord(text=str(choice.microbatch)),),
        (recompute_word(choice),),
    )


def plan_numbers(estimate: Estimate) -> tuple[str, str, str, str]:
    """Return seconds of a step, tokens/s of a device, MFU and GiB as tables have them."""
    return (
        f"{estimate.step_s:.4g}",
        f"{estimate.tokens_per_s_per_device:.0f}",
        f"{100 * estimate.mfu:.1f}",
        gib(estimate.bytes_held),
    )


def row_words(choice: CandidatePlan, *, devices: bool = False) -> tuple[PlanWord, ...]:
    """Return all choices of a plan in one cell: two plans never have the same words.

    With `devices`, their number too.
    """
    words = [*mesh_words(choice), zero_word(choice, "zero")]
    if choice.mesh.pp > 1:
        words.append(schedule_word(choice))
    if choice.microbatch > 1:
        sign = ("mbN", "microbatches of N sequences")
        words.append(PlanWord(text=f"mb{choice.microbatch}", signs=(sign,)))
    if choice.recompute or choice.operators:
        words += [PlanWord(text="rec", signs=(("rec", "recomputed"),)), recompute_word(choice)]
    words += _rounding_words(choice)
    if devices:
        words.append(PlanWord(text=f"on {choice.devices:,} devices"))
    return tuple(words)


def sentence_words(choice: CandidatePlan) -> tuple[PlanWord, ...]:
    """Words with signs of a plan in a sentence."""
    return (*mesh_words(choice), schedule_word(choice))


def words_text(words: Iterable[PlanWord]) -> str:
    """Return words as they are printed."""
    return " ".join(word.text for word in words)


def sign_texts(words: Iterable[PlanWord]) -> Iterator[str]:
    """Yield what each sign of some words means, once."""
    signs = dict.fromkeys(sign for word in words for sign in word.signs)
    for sign, meaning in signs:
        yield f"{sign}: {meaning}."


_ZERO_SIGNS = {
    "+k": "parameters stay whole after forward",
    "+s": "nodes keep slices of gathered units",
    "+h": "optimizer state on the host",
}
_SUFFIXES = {"tpNs": "with sequence parallelism", "epNt": "tensor ranks cut experts too"}


def _with_suffix(axis: str, degree: int, suffix: str) -> PlanWord:
    sign = f"{axis}N{suffix}"
    return PlanWord(
        text=f"{axis}{degree}{suffix}", signs=((sign, _SUFFIXES[sign]),) if suffix else ()
    )


def _rounding_words(choice: CandidatePlan) -> tuple[PlanWord, ...]:
    settings = choice.rounding.settings()
    return tuple(PlanWord(text=f"{key}={value}") for key, value in settings.items())


def _data_word(choice: CandidatePlan) -> PlanWord:
    """Data ranks; with ZeRO, replicas differ from shards in their words."""
    mesh = choice.mesh
    if mesh.dp_replicate == 1 or (mesh.dp_shard == 1 and choice.zero == 0):
        return PlanWord(text=f"dp{mesh.dp}")
    text = f"dp{mesh.dp_replicate}x{mesh.dp_shard}"
    return PlanWord(text=text, signs=(("dpRxS", "R replicas of S shards"),))


def _context_word(choice: CandidatePlan) -> PlanWord:
    record, cp = CONTEXT_KINDS[choice.context], choice.mesh.cp
    if not record.symbol:
        return PlanWord(text=f"cp{cp}")
    if record.exchange == "inner":
        sign = (f"cpN{record.symbol}U", "U of N context ranks exchange heads")
        return PlanWord(text=f"cp{cp}{record.symbol}{choice.ulysses}", signs=(sign,))
    sign = (f"cpN{record.symbol}", f"{choice.context} over N context ranks")
    return PlanWord(text=f"cp{cp}{record.symbol}", signs=(sign,))
