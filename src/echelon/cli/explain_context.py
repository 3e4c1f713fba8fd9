"""`echelon explain context`: the ways to split a long sequence, and which fits a run.

Without a run: what each kind splits, sends, holds and asks for. With one: every kind with the
numbers of that run, what refuses it where it is refused, and the one that waits least. All numbers
are those of `cost/context_*.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echelon.cli.explain_context_fits import (
    ContextQuestion,
    Fit,
    gathers,
    shown_s,
    why,
)
from echelon.cli.explain_context_ways import ways_json, ways_text
from echelon.cli.output import table
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.core.units import binary_bytes, decimal_bytes
from echelon.cost.context_facts import kv_bytes
from echelon.cost.context_times import AttentionSeconds
from echelon.cost.context_work import chunk_runs, meetings

MOST_CHUNKS = 32


def context_json(question: ContextQuestion | None) -> dict[str, Any]:
    """Return the page as JSON values."""
    found = ways_json()
    if question is None:
        return found
    taken = question.taken
    return found | {
        "cp": question.asked.mesh.cp,
        "kinds": [_fit_json(fit) for fit in question.fits],
        "refused": [{"kind": k, "rule": r, "message": m} for k, r, m in question.refused],
        "asked": question.asked.layout.context.kind,
        "taken": taken and taken.kind,
        "why": taken and why(question, taken),
        "kv_bytes": _kv(question.asked),
        "coverage": taken and list(_coverage_json(taken.plan)),
    }


def context_text(question: ContextQuestion | None) -> str:
    """Return the page that a person reads."""
    return ways_text() if question is None else "\n\n".join(_parts(question)) + "\n"


def _parts(question: ContextQuestion) -> Iterator[str]:
    plan, model = question.asked, question.asked.model
    mask = "causal" if model.causal else "full"
    mask += f", window {model.window}" if model.window is not None else ""
    mask += f", soft cap {model.soft_cap:g}" if model.soft_cap is not None else ""
    separate = plan.mathematics.documents == "separate"
    mask += ", documents apart" if separate else ""
    yield (
        f"{model.name} over cp = {plan.mesh.cp} ranks: {plan.layout.microbatch_sequences} x "
        f"{plan.mathematics.sequence_length} positions a microbatch, {mask},\n"
        f"{model.heads // plan.mesh.tp} heads ({model.kv_heads // plan.mesh.tp} key/value) on a "
        "tensor rank. For one block and microbatch, on the rank that has most:"
        + "\n(Sequences of several documents are less work, less evenly.)"
        * separate
    )
    yield _fits(question)
    if model.latent is not None:
        yield "Latent attention: keys and values are counted as full heads, as they meet queries."
    if question.refused:
        lines = [f"  {kind}: {message} [{rule}]" for kind, rule, message in question.refused]
        yield "Not with these numbers:\n\n" + "\n".join(lines)
    yield "\n".join(_legend())
    taken = question.taken
    if taken is not None:
        yield "Which to take\n\n  " + why(question, taken)
        terms = "\n".join(
            f"  {term.name}: {term.formula} = {binary_bytes(term.bytes)}"
            for term in taken.memory.peak.terms
        )
        yield f"{taken.kind} holds most at: {taken.memory.peak.name}\n\n{terms}"
        yield _coverage(taken.plan)
    yield "Keys and values of this shape, one sequence\n\n" + "\n".join(_kv_lines(plan))


def _fits(question: ContextQuestion) -> str:
    rows = [
        (
            fit.kind + (" (this run)" if fit.plan == question.asked else ""),
            fit.plan.layout.context.ulysses_degree,
            decimal_bytes(fit.sent.forward),
            decimal_bytes(fit.sent.backward),
            f"{fit.chunks:.3g}",
            binary_bytes(fit.memory.kept_bytes),
            binary_bytes(fit.memory.peak.bytes),
            f"{100 * fit.imbalance:.2f} %",
            *_seconds(fit.seconds),
        )
        for fit in question.fits
    ]
    head = ("kind", "u", "sent forward", "backward", "chunks", "kept", "at most", "uneven")
    return table((*head, "works", "travels", "waits"), rows)


def _seconds(seconds: AttentionSeconds | None) -> tuple[str, str, str]:
    if seconds is None:
        return "-", "-", "-"
    return (
        shown_s(seconds.work_s),
        shown_s(seconds.transfer_s),
        shown_s(seconds.exposed_s),
    )


def _legend() -> Iterator[str]:
    yield "u        ranks that exchange heads for positions"
    yield "sent     bytes, echelon plan adds them up over a step"
    yield "chunks   of T / cp keys (T / n on a ring of n) that are there at a time, its own too"
    yield "kept     for backward: queries, keys, values, output, log-sum-exp"
    yield "at most  beside that, while attention runs"
    yield "uneven   (most - least) / most of the visible pairs of a rank"
    yield "waits    transfers that no work hides, at the peaks of devices and links"


def _coverage(plan: Plan) -> str:
    """Draw which chunks meet at which step."""
    chunks = chunk_runs(plan.placement)
    title = f"Which chunks meet at which step ({plan.layout.context.kind})"
    if plan.placement.ring_degree == 1:
        return f"{title}\n\n  every query meets every key at once, each rank for its own heads"
    if len(chunks) > MOST_CHUNKS:
        return f"{title}\n\n  {len(chunks)} chunks are too many to draw: --json has them"
    met = {
        (one.queries, one.keys): one.step
        for one in meetings(plan.placement, plan.model.mask, gathered=gathers(plan))
    }
    names = [str(chunk) for chunk in range(len(chunks))]
    width = max(map(len, names))
    rows = [
        f"  {q:>{width}} on {place:<{width}}  "
        + " ".join(f"{met.get((q, k), '.'):>{width}}" for k in range(len(chunks)))
        for q, (place, _) in enumerate(chunks)
    ]
    head = "  " + " " * (2 * width + 6) + " ".join(f"{name:>{width}}" for name in names)
    note = (
        "  rows: query chunks and their place on the ring; columns: key chunks; . is masked.\n"
        f"  {len(met)} of {len(chunks) ** 2} pairs of chunks meet, each once"
    )
    return "\n".join([f"{title}\n", head, *rows, "", note])


def _coverage_json(plan: Plan) -> Iterator[dict[str, int]]:
    for one in meetings(plan.placement, plan.model.mask, gathered=gathers(plan)):
        yield {
            "queries": one.queries,
            "keys": one.keys,
            "place": one.place,
            "step": one.step,
            "pairs": one.pairs,
        }


def _kv(plan: Plan) -> dict[str, int]:
    model, length = plan.model, plan.mathematics.sequence_length
    size = DTYPE_BYTES[plan.mathematics.precision.parameters]
    return {
        "block": kv_bytes(length, model.kv_dim, 1, size),
        "model": kv_bytes(length, model.kv_dim, model.layers, size),
        "model_with_all_heads": kv_bytes(length, model.query_dim, model.layers, size),
        "rank": kv_bytes(length // plan.mesh.cp, model.kv_dim, model.layers, size),
    }


def _kv_lines(plan: Plan) -> Iterator[str]:
    found, model = _kv(plan), plan.model
    cells = {
        "of one block, 2 T K h s": found["block"],
        f"of {model.layers} blocks": found["model"],
        f"  were there {model.heads} key/value heads": found["model_with_all_heads"],
        f"of {model.layers} blocks on each of {plan.mesh.cp} ranks": found["rank"],
    }
    width = max(map(len, cells))
    for name, value in cells.items():
        yield f"  {name:<{width}}  {decimal_bytes(value):>10} = {binary_bytes(value)}"


def _fit_json(fit: Fit) -> dict[str, Any]:
    seconds = fit.seconds
    return {
        "kind": fit.kind,
        "ulysses_degree": fit.plan.layout.context.ulysses_degree,
        "sent_forward_bytes": fit.sent.forward,
        "sent_backward_bytes": fit.sent.backward,
        "resident_chunks": fit.chunks,
        "kept_bytes": fit.memory.kept_bytes,
        "peak_bytes": fit.memory.peak.bytes,
        "peak_phase": fit.memory.peak.name,
        "imbalance": fit.imbalance,
        "work_s": seconds and seconds.work_s,
        "transfer_s": seconds and seconds.transfer_s,
        "exposed_s": seconds and seconds.exposed_s,
    }
