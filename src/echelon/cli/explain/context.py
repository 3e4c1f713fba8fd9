# SPDX-License-Identifier: Apache-2.0
"""`echelon explain context`: the ways to split a long sequence, and which fits a run.

Without a run: what each kind splits, sends, holds and asks for. With one: every kind with the
numbers of that run, what refuses it where it is refused, and the one that waits least. All numbers
are those of `cost/context_*.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echelon.cli.flags import bad_argument, plan_if_named
from echelon.config.load import load_job
from echelon.core.attention_mask import AttentionMask, Placement
from echelon.core.choices.context_kinds import CONTEXT_KINDS, ContextKindFacts
from echelon.core.errors import ConfigError
from echelon.core.plan import DTYPE_BYTES, ContextKind, Plan
from echelon.core.units import GIB, binary_bytes, decimal_bytes, duration
from echelon.cost.activations.closed_forms import gpt_block_bytes
from echelon.cost.bytes.context_memory import AttentionMemory, most_attention_memory
from echelon.cost.bytes.context_sent import block_bytes
from echelon.cost.bytes.model_sizes import attention_merge_errors, kv_bytes
from echelon.cost.seconds.block import ExposedSeconds, context_seconds
from echelon.layout.context_work import ChunkPair, attention_imbalance, chunk_pairs, chunk_runs
from echelon.layout.ring_transfers import gathered_chunks, resident_chunks
from echelon.planner.view.text_layout import WIDTH, flow_text, table, wrap_text

KINDS: tuple[ContextKind, ...] = tuple(CONTEXT_KINDS)
ALIKE = 0.01
"""Two kinds are as fast where they differ by less than this share: the smaller one is taken."""

ALIKE_BYTES = 0.1
"""Two kinds are as small where they differ by less than this share: the first one is taken."""

MOST_CHUNKS = 32  # chunks of a mask
PLACES = 4  # context ranks
LENGTH = 64  # tokens
LONG = 128 * 1024  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextKindCost:
    """Hold what one kind costs a run."""

    plan: Plan
    sent: tuple[int, int]
    """Bytes of a block and microbatch, forward and backward."""
    chunks: float
    memory: AttentionMemory
    imbalance: float
    seconds: ExposedSeconds | None

    @classmethod
    def of(cls, plan: Plan) -> ContextKindCost:
        """Return the costs of a plan: those of the rank that has most of each."""
        ranks = [block_bytes(plan, rank) for rank in range(plan.mesh.cp)]
        resident = gathered_chunks if gathers_keys(plan) else resident_chunks
        return cls(
            plan=plan,
            sent=max(ranks, key=sum),
            chunks=resident(plan.placement, plan.model.mask),
            memory=most_attention_memory(plan),
            imbalance=attention_imbalance(plan),
            seconds=context_seconds(plan),
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
    costs: tuple[ContextKindCost, ...]
    refused: tuple[tuple[ContextKind, str, str], ...]

    @property
    def recommended(self) -> ContextKindCost | None:
        """Return the fastest kind, of those as fast the one that holds least, of those the first.

        Where a link is not known it is the one that sends least.
        """
        timed = [(fit, fit.seconds.total_s) for fit in self.costs if fit.seconds is not None]
        if len(timed) < len(self.costs):
            return min(self.costs, key=lambda fit: sum(fit.sent))
        least = min((seconds for _, seconds in timed), default=0.0)
        as_fast = [fit for fit, seconds in timed if seconds <= least * (1 + ALIKE)]
        smallest = min((fit.peak_bytes for fit in as_fast), default=0)
        as_small = (fit for fit in as_fast if fit.peak_bytes <= smallest * (1 + ALIKE_BYTES))
        return next(as_small, None)


def ask_context(run: str | None = None, settings: Sequence[str] = ()) -> ContextQuestion | None:
    """Return the question; None where no run is asked about.

    Raises ConfigError where the run itself is wrong, or splits no sequence.
    """
    asked = plan_if_named(run, settings, "context nano")
    if run is None or asked is None:
        return None
    if asked.mesh.cp == 1:
        instead = f"echelon explain context {run} --set mesh.cp=2"
        raise bad_argument(f"{run} splits no sequence: mesh.cp = 1", instead)
    fits: list[ContextKindCost] = []
    refused: list[tuple[ContextKind, str, str]] = []
    for kind in KINDS:
        try:
            fits.append(ContextKindCost.of(_with_kind(asked, kind, run, settings)))
        except ConfigError as error:
            refused.extend((kind, problem.rule, problem.message) for problem in error.problems)
    return ContextQuestion(asked=asked, costs=tuple(fits), refused=tuple(refused))


def _with_kind(asked: Plan, kind: ContextKind, run: str, settings: Sequence[str]) -> Plan:
    """Return the plan of another kind; a degree of the one that was asked for is left to us."""
    if kind == asked.layout.context.kind:
        return asked
    free = {"context.kind": kind, "context.ulysses_degree": "auto"}
    others = [one for one in settings if one.partition("=")[0].strip() not in free]
    return load_job(run, (*others, *(f"{key}={value}" for key, value in free.items()))).plan


def gathers_keys(plan: Plan) -> bool:
    """Return whether each rank gets all keys that it needs at once."""
    return plan.layout.context.record.gathers_keys


def recommendation_text(question: ContextQuestion, taken: ContextKindCost) -> str:
    """Return why a kind is the one to take, in one sentence of its numbers and the next one's."""
    others = [fit for fit in question.costs if fit is not taken]
    if taken.seconds is None:
        total = sum(taken.sent)
        return f"{taken.kind} sends least ({decimal_bytes(total)}); the links are not known."
    exposed, transfer = shown_s(taken.seconds.exposed_s), shown_s(taken.seconds.transfer_s)
    text = (
        f"{taken.kind}: {shown_s(taken.seconds.total_s)}, with {exposed} exposed of {transfer} "
        "of transfers"
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


def context_json(question: ContextQuestion | None) -> dict[str, Any]:
    """Return the page as JSON values."""
    found = context_kinds_json()
    if question is None:
        return found
    taken = question.recommended
    return found | {
        "cp": question.asked.mesh.cp,
        "kinds": [_fit_json(fit) for fit in question.costs],
        "refused": [{"kind": k, "rule": r, "message": m} for k, r, m in question.refused],
        "asked": question.asked.layout.context.kind,
        "taken": taken and taken.kind,
        "why": taken and recommendation_text(question, taken),
        "kv_bytes": _kv(question.asked),
        "coverage": taken
        and [
            {name: value for name, value in asdict(one).items() if name != "owner"}
            for one in _pairs(taken.plan)
        ],
    }


def context_text(question: ContextQuestion | None, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    return (
        context_kinds_text(columns=columns)
        if question is None
        else "\n\n".join(_parts(question, columns=columns)) + "\n"
    )


def _parts(question: ContextQuestion, *, columns: int) -> Iterator[str]:
    plan, model = question.asked, question.asked.model
    mask = "causal" if model.causal else "full"
    mask += f", window {model.window}" if model.window is not None else ""
    mask += f", soft cap {model.soft_cap:g}" if model.soft_cap is not None else ""
    separate = plan.mathematics.documents == "separate"
    mask += ", documents apart" * separate
    yield (
        f"{model.name} over cp = {plan.mesh.cp} ranks: {plan.layout.microbatch_sequences} x "
        f"{plan.mathematics.sequence_length} positions a microbatch, {mask}, "
        f"{model.heads // plan.mesh.tp} heads ({model.kv_heads // plan.mesh.tp} key/value) on a "
        "tensor rank. For one block and microbatch, on the rank that has most:"
        + "\n(Sequences of several documents are less work, less evenly.)"
        * separate
    )
    yield _fits(question, columns=columns)
    if model.latent is not None:
        yield "Latent attention: keys and values are counted as full heads, as they meet queries."
    if question.refused:
        lines = [f"  {kind}: {message} [{rule}]" for kind, rule, message in question.refused]
        yield "Not with these numbers:\n\n" + "\n".join(lines)
    yield "\n".join(_legend())
    taken = question.recommended
    if taken is not None:
        yield "Which to take\n\n  " + recommendation_text(question, taken)
        terms = "\n".join(
            f"  {term.name}: {term.formula} = {binary_bytes(term.bytes)}"
            for term in taken.memory.peak.terms
        )
        yield f"{taken.kind} holds most at: {taken.memory.peak.name}\n\n{terms}"
        yield _coverage(taken.plan)
    yield "Keys and values of this shape, one sequence\n\n" + "\n".join(_kv_lines(plan))


def _fits(question: ContextQuestion, *, columns: int) -> str:
    rows = [
        (
            fit.kind + (" (this run)" if fit.plan == question.asked else ""),
            fit.plan.layout.context.ulysses_degree,
            decimal_bytes(fit.sent[0]),
            decimal_bytes(fit.sent[1]),
            f"{fit.chunks:.3g}",
            binary_bytes(fit.memory.kept_bytes),
            binary_bytes(fit.memory.peak.bytes),
            f"{100 * fit.imbalance:.2f} %",
            *("-" if seconds is None else shown_s(seconds) for seconds in _times(fit).values()),
        )
        for fit in question.costs
    ]
    head = ("kind", "u", "sent forward", "backward", "chunks", "kept", "at most", "uneven")
    return table((*head, "compute", "transfer", "exposed"), rows, columns=columns)


def _times(fit: ContextKindCost) -> dict[str, float | None]:
    """Return what attention computes, sends and waits for, by its name in JSON; None: not known."""
    names = ("compute_s", "transfer_s", "exposed_s")
    return {name: fit.seconds and getattr(fit.seconds, name) for name in names}


def _legend() -> Iterator[str]:
    yield "u        ranks that exchange heads for positions"
    yield "sent     bytes, echelon plan adds them up over a step"
    yield "chunks   of T / cp keys (T / n on a ring of n) that are there at a time, its own too"
    yield "kept     for backward: queries, keys, values, output, log-sum-exp"
    yield "at most  beside that, while attention runs"
    yield "uneven   (most - least) / most of the visible pairs of a rank"
    yield "exposed  transfers that no attention hides, at the rates that devices and links reach"


def _coverage(plan: Plan) -> str:
    """Draw which chunks meet at which step."""
    chunks = chunk_runs(plan.placement)
    title = f"Which chunks meet at which step ({plan.layout.context.kind})"
    if plan.placement.ring_degree == 1:
        return f"{title}\n\n  every query meets every key at once, each rank for its own heads"
    if len(chunks) > MOST_CHUNKS:
        return f"{title}\n\n  {len(chunks)} chunks are too many to draw: --json has them"
    met = {(one.queries, one.keys): one.step for one in _pairs(plan)}
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


def _pairs(plan: Plan) -> tuple[ChunkPair, ...]:
    return chunk_pairs(plan.placement, plan.model.mask, gathered=gathers_keys(plan))


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
        yield f"  {name:<{width}}  {binary_bytes(value)}"


def _fit_json(fit: ContextKindCost) -> dict[str, Any]:
    return {
        "kind": fit.kind,
        "ulysses_degree": fit.plan.layout.context.ulysses_degree,
        "sent_forward_bytes": fit.sent[0],
        "sent_backward_bytes": fit.sent[1],
        "resident_chunks": fit.chunks,
        "kept_bytes": fit.memory.kept_bytes,
        "peak_bytes": fit.memory.peak.bytes,
        "peak_phase": fit.memory.peak.name,
        "imbalance": fit.imbalance,
        **_times(fit),
    }


def context_kinds_json() -> dict[str, Any]:
    """Return the kinds and the facts as JSON values."""
    alone, unweighted, merged = attention_merge_errors()
    full, causal = _met(causal=False), _met(causal=True)
    return {
        "kinds": {kind: asdict(record.facts) for kind, record in CONTEXT_KINDS.items()},
        "facts": {
            "places": PLACES,
            "pairs": {"full": sum(full), "causal": sum(causal)},
            "pairs_without_a_ring": {"full": full[0], "causal": causal[0]},
            "resident_chunks": {"without_overlap": _resident(False), "overlapped": _resident(True)},
            "errors": {"own_keys": alone, "added_up": unweighted, "merged": merged},
        },
    }


def context_kinds_text(*, columns: int = WIDTH) -> str:
    """Return the page of the kinds, without a run."""
    head = (
        "Context parallelism: each of cp ranks holds T / cp positions of every sequence, and of "
        "all activations, not those of attention alone. The kinds differ in how queries meet keys. "
        "u ranks exchange heads, n = cp / u are on a ring. Elements of one block and microbatch "
        "on a rank: O = B T/c H h queries, KV = 2 B T/n K'/u h keys and values; s bytes of one, "
        "w = max(4, s) of a sum."
    )
    parts = [
        head,
        "\n\n".join(
            "\n".join(_kind_lines(kind, record.facts)) for kind, record in CONTEXT_KINDS.items()
        ),
        "Three facts\n\n" + "\n".join(_three(columns)),
        "Keys and values of a long sequence, 16 bits, T = 128 x 1024: 2 T K h L s\n\n"
        + _kinds_kv(columns=columns),
        "The same 80 blocks over N ranks, cut along the sequence or by blocks\n\n"
        + _cuts(columns=columns),
        "Sequence parallelism is another thing\n\n"
        + flow_text(_sequence(), indent="  ", columns=columns),
        "For your own run: echelon explain context RUN --set mesh.cp=4",
    ]
    return "\n\n".join(parts) + "\n"


def _kind_lines(kind: str, way: ContextKindFacts) -> Iterator[str]:
    yield f"{kind}: {way.when}"
    for title, text in (
        ("splits", way.splits),
        ("sends", f"forward {way.forward}"),
        ("", f"backward {way.backward}"),
        ("holds", way.holds),
        ("divides", way.divides),
        ("source", way.source),
    ):
        yield f"  {title:<7}  {text}"


def _met(*, causal: bool) -> list[int]:
    """Return the pairs of chunks that meet at each step of a ring of four."""
    place = Placement(kind="contiguous", ring_degree=PLACES, ulysses_degree=1, length=LENGTH)
    found = chunk_pairs(place, AttentionMask(causal=causal), gathered=False)
    return [sum(one.step == step for one in found) for step in range(PLACES)]


def _resident(overlapped: bool) -> float:
    place = Placement(kind="zigzag", ring_degree=PLACES, ulysses_degree=1, length=LENGTH)
    return resident_chunks(place, AttentionMask(causal=False), overlapped=overlapped)


def _three(columns: int) -> Iterator[str]:
    full, causal = _met(causal=False), _met(causal=True)
    alone, unweighted, merged = attention_merge_errors(ranks=PLACES)
    facts = (
        "A query needs the keys of other ranks. With those of its own rank alone, "
        f"{sum(full) - full[0]} of {sum(full)} pairs of chunks on {PLACES} ranks are missing "
        f"({sum(causal) - causal[0]} of {sum(causal)} under a causal mask); in a small "
        f"example the output is wrong by {alone:.2f}.",
        "Outputs are never summed over ranks: each rank computes all of its own queries. "
        "Keys and values travel forward, and the sums of their gradients backward.",
        "Parts merge by their log-sum-exp. Added up with equal weights the example is wrong "
        f"by {unweighted:.2f}, merged by {merged:.0e}.",
    )
    for number, fact in enumerate(facts, start=1):
        yield from wrap_text(fact, f"  {number}. ", "     ", columns=columns)
    last = (
        f"A ring that waits for each transfer holds {_resident(False):g} chunks of keys and "
        f"values, one that overlaps them {_resident(True):g}: its own, that at work, the next."
    )
    yield from wrap_text(last, "  ", "  ", columns=columns)


def _kinds_kv(*, columns: int) -> str:
    shapes = (
        ("32 blocks, 32 heads of 128 (7B)", 4096, 32),
        ("80 blocks, 64 heads of 128", 8192, 80),
        ("80 blocks, 8 of 64 heads (grouped)", 1024, 80),
    )
    rows = [
        (
            name,
            *(
                f"{kv_bytes(LONG // n, width, count) / GIB:g} GiB"
                for n in (1, 8)
                for count in (1, layers)
            ),
        )
        for name, width, layers in shapes
    ]
    return table(("", "a block", "all", "a block, N = 8", "all, N = 8"), rows, columns=columns)


def _cuts(*, columns: int) -> str:
    def cells(length: int, layers: int) -> tuple[str, str]:
        whole, each = (kv_bytes(length, 8192, count) / GIB for count in (layers, 1))
        return f"{whole:g} GiB", f"{each:g} GiB of each of {layers}"

    rows = [(ranks, *cells(LONG // ranks, 80), *cells(LONG, 80 // ranks)) for ranks in (1, 2, 4, 8)]
    return table(("N", "sequence", "that is", "by blocks", "that is"), rows, columns=columns)


def _sequence() -> Iterator[str]:
    sizes = (2048, 8192, 64)
    whole = gpt_block_bytes(*sizes)
    tensor = gpt_block_bytes(*sizes, tp=8)
    both = gpt_block_bytes(*sizes, tp=8, sequence_parallel=True)
    yield "  It splits what tensor ranks would each hold whole (norms, dropout), not attention:"
    yield f"  a block of T = 2048, D = 8192, 64 heads keeps {binary_bytes(whole)} on one device,"
    yield f"  {binary_bytes(tensor)} on each of 8 tensor ranks, {binary_bytes(both)} with it:"
    yield "  1/8 of the whole (Korthikanti et al., 2022; scores kept). cp splits all of it again."
