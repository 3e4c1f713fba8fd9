"""What each kind of context parallelism costs one run, and the one that it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.plan import ContextKind, Plan
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.core.units import binary_bytes, decimal_bytes, duration
from echelon.cost.context_memory import AttentionMemory, most_attention_memory
from echelon.cost.context_resident import gathered_chunks, resident_chunks
from echelon.cost.context_times import (
    AttentionSeconds,
    BlockBytes,
    attention_seconds,
    block_bytes,
)
from echelon.cost.context_work import imbalance

KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
ALIKE = 0.01
"""Two kinds are as fast where they differ by less than this share: the smaller one is taken."""

ALIKE_BYTES = 0.1
"""Two kinds are as small where they differ by less than this share: the first one is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Hold what one kind costs a run."""

    plan: Plan
    sent: BlockBytes
    chunks: float
    memory: AttentionMemory
    imbalance: float
    seconds: AttentionSeconds | None

    @classmethod
    def of(cls, plan: Plan) -> Fit:
        """Return the costs of a plan: those of the rank that has most of each."""
        ranks = [block_bytes(plan, rank) for rank in range(plan.mesh.cp)]
        return cls(
            plan=plan,
            sent=max(ranks, key=lambda sent: sent.forward + sent.backward),
            chunks=_chunks(plan),
            memory=most_attention_memory(plan),
            imbalance=imbalance(plan),
            seconds=attention_seconds(plan),
        )

    @property
    def kind(self) -> ContextKind:
        """Return how the ranks meet."""
        return self.plan.layout.context.kind

    @property
    def peak_bytes(self) -> int:
        """Return what attention of one block holds at most, with what it keeps for backward."""
        return self.memory.kept_bytes + self.memory.peak.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextQuestion:
    """Hold the run that was asked about, what each kind costs it, and which rules refuse others."""

    asked: Plan
    fits: tuple[Fit, ...]
    refused: tuple[tuple[ContextKind, str, str], ...]

    @property
    def taken(self) -> Fit | None:
        """Return the fastest kind, of those as fast the one that holds least, of those the first.

        Where a link is not known it is the one that sends least.
        """
        timed = [(fit, fit.seconds.total_s) for fit in self.fits if fit.seconds is not None]
        if len(timed) < len(self.fits):
            return min(self.fits, key=lambda fit: fit.sent.forward + fit.sent.backward)
        least = min((seconds for _, seconds in timed), default=0.0)
        as_fast = [fit for fit, seconds in timed if seconds <= least * (1 + ALIKE)]
        smallest = min((fit.peak_bytes for fit in as_fast), default=0)
        as_small = (fit for fit in as_fast if fit.peak_bytes <= smallest * (1 + ALIKE_BYTES))
        return next(as_small, None)


def ask_context(run: str | None, settings: Sequence[str]) -> ContextQuestion | None:
    """Return the question; None where no run is asked about.

    Raises ConfigError where the run itself is wrong, or splits no sequence.
    """
    if run is None:
        if settings:
            raise ConfigError(
                BAD_ARGUMENT.problem(
                    "--set has an effect where a run is named",
                    set_by="the command line",
                    works=(f"echelon explain context nano --set {' --set '.join(settings)}",),
                )
            )
        return None
    asked = load_job(run, settings).plan
    if asked.mesh.cp == 1:
        raise ConfigError(
            BAD_ARGUMENT.problem(
                f"{run} splits no sequence: mesh.cp = 1",
                set_by="the command line",
                works=(f"echelon explain context {run} --set mesh.cp=2",),
            )
        )
    fits: list[Fit] = []
    refused: list[tuple[ContextKind, str, str]] = []
    for kind in KINDS:
        try:
            fits.append(Fit.of(_with_kind(asked, kind, run, settings)))
        except ConfigError as error:
            refused.extend((kind, problem.rule, problem.message) for problem in error.problems)
    return ContextQuestion(asked=asked, fits=tuple(fits), refused=tuple(refused))


def _with_kind(asked: Plan, kind: ContextKind, run: str, settings: Sequence[str]) -> Plan:
    """Return the plan of another kind; a degree of the one that was asked for is left to us."""
    if kind == asked.layout.context.kind:
        return asked
    free = {"context.kind": kind, "context.ulysses_degree": "auto"}
    others = [one for one in settings if one.partition("=")[0].strip() not in free]
    return load_job(run, (*others, *(f"{key}={value}" for key, value in free.items()))).plan


def _chunks(plan: Plan) -> float:
    resident = gathered_chunks if gathers(plan) else resident_chunks
    return resident(plan.placement, plan.model.mask)


def gathers(plan: Plan) -> bool:
    """Return whether each rank gets all keys that it needs at once."""
    return plan.layout.context.kind == "gathered"


def why(question: ContextQuestion, taken: Fit) -> str:
    """Return why a kind is the one to take, in one sentence of its numbers and the next one's."""
    others = [fit for fit in question.fits if fit is not taken]
    if taken.seconds is None:
        total = taken.sent.forward + taken.sent.backward
        return f"{taken.kind} sends least ({decimal_bytes(total)}); the links are not known."
    text = (
        f"{taken.kind}: {shown_s(taken.seconds.total_s)}, of which it waits "
        f"{shown_s(taken.seconds.exposed_s)} for {shown_s(taken.seconds.transfer_s)} of transfers"
    )
    timed = [(fit, fit.seconds.total_s) for fit in others if fit.seconds is not None]
    if not timed:
        return text + "."
    near, seconds = min(timed, key=lambda pair: pair[1])
    if seconds <= taken.seconds.total_s * (1 + ALIKE):
        much = near.peak_bytes > taken.peak_bytes * (1 + ALIKE_BYTES)
        held = f"{binary_bytes(near.peak_bytes)}, not {binary_bytes(taken.peak_bytes)}"
        return f"{text}; {near.kind} is as fast and holds {held if much else 'about as much'}."
    return f"{text}; the next, {near.kind}, takes {shown_s(seconds)}."


def shown_s(seconds: float) -> str:
    """Return seconds for people: ``1.32 ms``."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else duration(seconds)
