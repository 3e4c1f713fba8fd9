# SPDX-License-Identifier: Apache-2.0
"""What attention over context ranks holds, by kind: until backward, and while it runs.

Of one block and one microbatch on one rank. B sequences of T positions, c context ranks, u in a
Ulysses group, n = c / u on the ring; H query and K key/value heads of width h on a tensor rank, K'
with their copies; s the bytes of an element, w = max(4, s). In elements

    O  = B T/c H h         queries, outputs and their gradients: the same before and within Ulysses
    KV = 2 B T/n K'/u h    keys and values of one place of the ring: 2 B T/c K' h
    L  = B T/c H           the log-sum-exp of each query

Until backward: queries, keys and values as attention met them, output, log-sum-exp. While it runs,
beside that (and beside the queries, keys, values and gradient that it is given), it is in one
*phase* after the other; what it holds at most is the phase that holds most:

    ring, striped   the merged output; the keys at work and on their way (`ring_transfers.py`);
                    backward the gradients of queries, of own and of visiting keys, in w, and what
                    arrives to be added
    gathered        all keys and values, n KV, twice while they are put in order; backward their
                    gradients in w, n KV again, twice while they are put in order to be summed
    ulysses         what is exchanged, O + KV, packed and whole; backward four of it

So it grows with T / c but for gathered, which grows with T. Kernels add a few tiles of a fixed size
for each of their threads, which is not counted; the blocks of scores of the plain kernel (soft
caps) and the masks at the edges of a window, which it makes, are.
Sources: Liu et al., "Ring Attention", 2023, section 3; Dao, "FlashAttention-2", 2023, section 3.1
(backward needs the output and the log-sum-exp alone).

The kernel decides, as `models/attention/local.py` chooses it. The plain kernel holds blocks of
scores; a GPU's memory-efficient kernel repeats key heads, and gives its output sequence by
sequence; flash attention, and the kernel of a CPU, do neither. Flash attention takes a window, or
all documents of a batch, in one call. cuDNN's kernel takes full and causal squares in its place,
and holds what it does: the output as the queries lie, a float32 log-sum-exp for each query and
head, gradients of key heads as many as there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.core.choices.kernels import ATTENTION_KERNELS
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.bytes.context_sent import (
    gathers_whole,
    kv_copies,
    kv_row_elements,
    ring_transfers_from_plan,
)
from echelon.cost.bytes.terms import WIDE_BYTES, HeldTerm
from echelon.layout.ring_transfers import num_rows, resident_rows
from echelon.layout.stage import plan_of_layer

LSE_COPIES = 4
"""Log-sum-exps that a merge holds at a time: of the piece, their sum, and two on the way to it."""

SINK_COPIES = 3
"""How often gradients of sinks hold the output: it and its gradient, widened, and a product."""
POSITION_BYTES = 8

SCORE_COLUMNS = 1024  # keys
MAX_SCORES = 2**22  # elements
SCORE_ROWS = 16  # queries
SCORE_COPIES_FORWARD = 6  # copies
SCORE_COPIES_BACKWARD = 7  # copies
"""How often the plain kernel holds a block of at most MAX_SCORES scores."""

EDGE_ROWS = 192  # queries
TILES_PER_WINDOW = 4  # tiles
EDGE_BYTES = 10
"""What the mask of an edge takes for each of its pairs while it is made: an int64, two bools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """Hold what is there at one time, term by term."""

    name: str
    terms: tuple[HeldTerm, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    @property
    def formula(self) -> str:
        """Return the formulas of all terms."""
        return " + ".join(term.formula for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Count the elements of what one block's attention works with on a rank of `plan`."""

    plan: Plan
    """The plan."""
    place: int
    """The place of the rank on the ring."""
    out: int
    """Elements of the output of attention here."""
    keys: int
    """Elements of keys and values of one place of the ring."""
    lse: int
    """Elements of the log-sum-exp here."""
    rows: int
    """Positions of one place of the ring."""
    row: int
    """Elements of keys and values of a position."""
    places: int
    """Places of the ring."""
    sequences: int
    """Sequences of a microbatch."""
    copied: int
    """Copies of each key/value head that are exchanged; 0 where there is one."""
    element_bytes: int
    """Bytes of an element."""
    wide: int
    """Bytes of an element of what is added up."""

    @classmethod
    def from_plan(cls, plan: Plan, cp_rank: int = 0) -> AttentionSizes:
        """Return the sizes on a context rank of a plan."""
        model, tp, cp = plan.model, plan.mesh.tp, plan.mesh.cp
        heads, kv_heads = model.heads // tp, model.kv_heads // tp
        degree, places = plan.layout.context.ulysses_degree, plan.placement.ring_degree
        rows, row = plan.mathematics.sequence_length // places, kv_row_elements(plan)
        element_bytes = DTYPE_BYTES[plan.mathematics.precision.parameters]
        copies = kv_copies(heads, kv_heads, degree)
        assert cp == degree * places
        return cls(
            plan=plan,
            place=plan.placement.ring_place(cp_rank),
            out=plan.local_tokens * heads * model.head_dim,
            keys=rows * row,
            lse=plan.local_tokens * heads,
            rows=rows,
            row=row,
            places=places,
            sequences=plan.layout.microbatch_sequences,
            copied=copies if copies > 1 else 0,
            element_bytes=element_bytes,
            wide=max(WIDE_BYTES, element_bytes),
        )

    @property
    def is_low_precision(self) -> bool:
        """Return whether sums are wider than what is summed."""
        return self.wide > self.element_bytes

    @property
    def exchanged(self) -> bool:
        """Return whether heads are exchanged for positions."""
        return self.plan.layout.context.ulysses_degree > 1

    @property
    def capped(self) -> bool:
        """Return whether the plain kernel runs, which holds scores."""
        return plain_kernel_runs(self.plan)

    def narrow_term(self, name: str, elements: int, formula: str) -> HeldTerm:
        """Return a term of elements; `formula` is that of their number."""
        return HeldTerm(name=name, bytes=elements * self.element_bytes, formula=f"{formula} s")

    def wide_term(self, name: str, elements: int, formula: str) -> HeldTerm:
        """Return a term of elements that are added up in at least fp32."""
        return HeldTerm(name=name, bytes=elements * self.wide, formula=f"{formula} w")

    def gathered_rows(self) -> int:
        """Return the rows of keys and values that a rank gathers: all, or those within reach."""
        if gathers_whole(self.plan):
            return self.rows * self.places
        return self.rows + ring_transfers_from_plan(self.plan).needed_rows(self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMemory:
    """Hold what a block keeps for its backward pass, and the phases of both passes."""

    kept: tuple[HeldTerm, ...]
    forward: tuple[MemoryPhase, ...]
    backward: tuple[MemoryPhase, ...]

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that wait for backward."""
        return sum(term.bytes for term in self.kept)

    @property
    def peak(self) -> MemoryPhase:
        """Return the phase that holds most beside what is kept."""
        return max((*self.forward, *self.backward), key=lambda phase: phase.bytes)


def attention_memory(plan: Plan, cp_rank: int) -> AttentionMemory:
    """Return what attention of one block and one microbatch holds on a context rank."""
    sizes = AttentionSizes.from_plan(plan, cp_rank)
    return AttentionMemory(
        kept=tuple(_kept(sizes)),
        forward=tuple(_forward_phases(sizes)),
        backward=tuple(_backward_phases(sizes)),
    )


def most_attention_memory(plan: Plan) -> AttentionMemory:
    """Return the memory of the context rank, and the kind of block, that holds most at a time."""
    first_of_groups = range(0, plan.mesh.cp, plan.layout.context.ulysses_degree)
    kinds = [plan_of_layer(plan, layer) for layer in plan.model.first_of_kinds]
    found = [attention_memory(plan, rank) for plan in kinds for rank in first_of_groups]
    return max(found, key=lambda memory: memory.peak.bytes)


def _kept(x: AttentionSizes) -> Iterator[HeldTerm]:
    if x.exchanged:
        yield x.narrow_term("queries, keys and values exchanged", x.out + x.keys, "(O + KV)")
    else:
        yield x.narrow_term("queries", x.out, "O")
    if x.places > 1 or not x.exchanged:
        yield x.narrow_term("keys and values", x.keys, "KV")
    yield x.narrow_term("output", x.out, "O")
    if x.exchanged:
        yield x.narrow_term("output of all heads", x.out, "O")
    elif x.capped:
        # The plain kernel gives it head by head: what is handed on may be a copy.
        yield x.narrow_term("output, position by position", x.out, "O")
    yield x.wide_term("log-sum-exp", x.lse, "L")


def _forward_phases(x: AttentionSizes) -> Iterator[MemoryPhase]:
    if x.exchanged:
        parts = [x.narrow_term("packed heads", x.out + x.keys, "(O + KV)")]
        if x.copied:
            parts.append(x.narrow_term("copies of key/value heads", x.keys, "KV"))
        yield MemoryPhase(name="forward, heads for positions", terms=tuple(parts))
        packed = x.narrow_term("packed and received output", 2 * x.out, "2 O")
        yield MemoryPhase(name="forward, positions for heads", terms=(packed,))
    if x.plan.model.sinks:
        wide = (x.wide_term("output with sinks", x.out, "O"),) if x.is_low_precision else ()
        wide += (x.wide_term("log-sum-exps of sinks", LSE_COPIES * x.lse, "4 L"),)
        yield MemoryPhase(name="forward, sinks", terms=wide)
    merging = (*_merged(x), *_kernel(x, SCORE_COPIES_FORWARD))
    if x.plan.layout.context.record.gathers_keys:
        yield _gathering(x, "forward")
        yield MemoryPhase(name="forward", terms=(_all_keys(x), *merging))
        return
    for resident in resident_rows(x.plan.placement, x.plan.model.mask, x.place)[: x.places]:
        blocks = _keys_of_others(x, resident.keys + resident.key_copies)
        yield MemoryPhase(name=f"forward, step {resident.step}", terms=(*blocks, *merging))


def _backward_phases(x: AttentionSizes) -> Iterator[MemoryPhase]:
    given: tuple[HeldTerm, ...] = ()
    if x.plan.model.sinks:
        copies = SINK_COPIES if x.is_low_precision else 1
        pulls = x.wide_term("output times its gradient", copies * x.out, f"{copies} O")
        yield MemoryPhase(name="backward, sinks", terms=(pulls,))
    if x.exchanged:
        given = (x.narrow_term("gradient of the output of own heads", x.out, "O"),)
        packed = x.narrow_term("gradient of the output, packed", x.out, "O")
        yield MemoryPhase(name="backward, heads for positions", terms=(*given, packed))
    if x.plan.layout.context.record.gathers_keys:
        yield from _backward_gathered(x)
    elif x.places > 1:
        yield from _backward_ring(x, given)
    else:
        both = x.wide_term("gradients", x.out + x.keys, "(O + KV)")
        sums = (both,) if _several_pieces(x) else ()
        parts = (*given, *sums, *_results(x, x.rows), *_kernel(x, SCORE_COPIES_BACKWARD))
        yield MemoryPhase(name="backward", terms=parts)
    if x.exchanged:
        # What attention kept is gone by then: its own gradients are in the place of that.
        moved = 3 * (x.out + x.keys)
        terms = [x.narrow_term("gradients joined, received, given on", moved, "3 (O + KV)")]
        if x.copied:
            summed, formula = x.keys // x.copied * x.wide, "KV w / copies"
            terms.append(HeldTerm(name="sums of copied heads", bytes=summed, formula=formula))
        yield MemoryPhase(name="backward, positions for heads", terms=tuple(terms))


def _backward_ring(x: AttentionSizes, given: tuple[HeldTerm, ...]) -> Iterator[MemoryPhase]:
    queries = x.wide_term("gradient of queries", x.out, "O")
    kernel = tuple(_kernel(x, SCORE_COPIES_BACKWARD))
    for resident in resident_rows(x.plan.placement, x.plan.model.mask, x.place):
        gradients = (resident.gradients + resident.gradient_copies) * x.row * x.wide
        formula = "KV w x (own + others)"
        own = resident.step in (0, x.places)
        terms = (
            *given,
            *_keys_of_others(x, resident.keys + resident.key_copies),
            queries,
            HeldTerm(name="gradients of keys", bytes=gradients, formula=formula),
            *_results(x, x.rows if own else resident.working),
            *kernel,
        )
        yield MemoryPhase(name=f"backward, step {resident.step}", terms=terms)
    if x.is_low_precision:
        sums = x.wide_term("sums of gradients", x.out + x.keys, "(O + KV)")
        narrow = x.narrow_term("gradients", x.out + x.keys, "(O + KV)")
        yield MemoryPhase(name="backward, the end", terms=(*given, sums, narrow))


def _keys_of_others(x: AttentionSizes, rows: int) -> tuple[HeldTerm, ...]:
    size, formula = rows * x.row * x.element_bytes, "KV s x blocks"
    return (HeldTerm(name="keys of other places", bytes=size, formula=formula),) if rows else ()


def _backward_gathered(x: AttentionSizes) -> Iterator[MemoryPhase]:
    whole, rows = _all_keys(x), x.gathered_rows()
    elements = rows * x.row
    queries = x.wide_term("gradient of queries", x.out, "O")
    gradients = x.wide_term("gradients of all keys", elements, "n KV")
    calls = (*_results(x, rows), *_kernel(x, SCORE_COPIES_BACKWARD))
    yield _gathering(x, "backward")
    yield MemoryPhase(name="backward", terms=(whole, queries, gradients, *calls))
    if gathers_whole(x.plan):
        received = (x.places - 1) * x.keys if x.plan.cluster.backend == "gloo" else 0
        ordered = x.wide_term("the same, by their owners", elements, "n KV")
        parts = x.wide_term("parts of the sum", received + x.keys, "n KV")
        moved = (ordered, parts, _positions(x))
    else:
        _, moving = ring_transfers_from_plan(x.plan).at(x.place)
        rows = sum(num_rows(transfer.rows) for transfer in moving)
        moved = (x.wide_term("what is packed and arrives", rows * x.row, "rows"),)
    yield MemoryPhase(name="backward, the sum", terms=(whole, queries, gradients, *moved))


def _gathering(x: AttentionSizes, name: str) -> MemoryPhase:
    whole = _all_keys(x)
    again = HeldTerm(name="the same, as they came", bytes=whole.bytes, formula=whole.formula)
    if gathers_whole(x.plan):
        beside = _positions(x)
    else:
        moving, _ = ring_transfers_from_plan(x.plan).at(x.place)
        packed = sum(num_rows(one.rows) for one in moving if len(one.rows) > 1)
        beside = x.narrow_term("what is packed", packed * x.row, "rows")
    return MemoryPhase(name=f"{name}, gathering", terms=(whole, again, beside))


def _all_keys(x: AttentionSizes) -> HeldTerm:
    formula = "n KV" if gathers_whole(x.plan) else "rows within reach"
    return x.narrow_term("keys and values of all", x.gathered_rows() * x.row, formula)


def _positions(x: AttentionSizes) -> HeldTerm:
    size = 2 * x.plan.mathematics.sequence_length * POSITION_BYTES
    return HeldTerm(name="their positions", bytes=size, formula="2 T x 8")


def _merged(x: AttentionSizes) -> Iterator[HeldTerm]:
    """Yield what a merge of several pieces holds beside the output that it becomes."""
    if not _several_pieces(x):
        return
    if x.is_low_precision:
        yield x.wide_term("merged output, and that of a piece", 2 * x.out, "2 O")
    else:
        yield x.wide_term("output of a piece", x.out, "O")
    yield x.wide_term("log-sum-exps of a merge", LSE_COPIES * x.lse, "4 L")


def _results(x: AttentionSizes, key_rows: int) -> Iterator[HeldTerm]:
    """Yield what a kernel's backward gives, and a wide copy of one of it where sums are wide.

    Kernels want the gradient of the output sequence by sequence: several of them are put so.
    """
    keys = key_rows * x.row
    if x.sequences > 1:
        yield x.narrow_term("gradient of the output, by sequence", x.out, "O")
    yield x.narrow_term("gradients of a piece", x.out + keys, "(O + KV)")
    if x.is_low_precision:
        yield x.wide_term("one of them, wide", max(x.out, keys // 2), "max(O, KV / 2)")


def _kernel(x: AttentionSizes, copies: int) -> Iterator[HeldTerm]:
    """Yield what a kernel makes for itself that a sequence or a mask decides."""
    model, length = x.plan.model, x.plan.mathematics.sequence_length
    queries = length // x.places
    if x.capped:
        per_pair = x.sequences * model.heads // x.plan.mesh.tp
        per_pair //= x.plan.layout.context.ulysses_degree
        columns = min(SCORE_COLUMNS, length)
        rows = min(queries, max(SCORE_ROWS, MAX_SCORES // (columns * per_pair)))
        size = rows * columns * (copies * per_pair * x.wide + EDGE_BYTES)
        yield HeldTerm(name="scores of a block", bytes=size, formula=f"{copies} scores w")
    elif _hides_keys(x.plan) and not flash_kernel_runs(x.plan):
        assert model.window is not None
        width = model.window if model.causal else 2 * model.window - 1
        rows = max(EDGE_ROWS, width // TILES_PER_WINDOW)
        columns = rows if width >= TILES_PER_WINDOW * EDGE_ROWS else rows + width
        size = min(rows, queries) * min(columns, length) * EDGE_BYTES
        yield HeldTerm(name="mask of an edge", bytes=size, formula=f"pairs x {EDGE_BYTES}")


def _several_pieces(x: AttentionSizes) -> bool:
    """Return whether attention of a rank may be more than one call of a kernel."""
    if flash_kernel_runs(x.plan):
        return x.places > 1
    documents = x.plan.mathematics.documents == "separate"
    return x.places > 1 or documents or _hides_keys(x.plan)


def _hides_keys(plan: Plan) -> bool:
    """Return whether a window is shorter than the sequence: else it is no window."""
    window = plan.model.window
    return window is not None and window < plan.mathematics.sequence_length


def on_gpu(plan: Plan) -> bool:
    """Return whether kernels are those of a GPU."""
    return plan.cluster.backend == "nccl"


def plain_kernel_runs(plan: Plan) -> bool:
    """Return whether the plain kernel runs, on the most that a plan knows of its masks.

    It is asked for, or fused ones cannot: they cap no scores; those of a GPU take no float64, heads
    of certain widths only, and where flash attention takes none, in float16 no bands, of which a
    window has some.
    """
    model, parameters = plan.model, plan.mathematics.precision.parameters
    if model.soft_cap is not None or plan.layout.context.attention == "plain":
        return True
    if not on_gpu(plan):
        return False
    flash = ATTENTION_KERNELS["flash"]
    bands = parameters == "fp16" and model.window is not None
    wide = model.head_dim > flash.max_head_dim
    return parameters == "fp64" or (bands and wide) or model.head_dim % flash.head_dim_multiple > 0


def flash_kernel_runs(plan: Plan) -> bool:
    """Return whether flash attention of a GPU runs: on 16-bit elements, heads not too wide."""
    flash, parameters = ATTENTION_KERNELS["flash"], plan.mathematics.precision.parameters
    fits = parameters in flash.dtypes and plan.model.head_dim <= flash.max_head_dim
    return on_gpu(plan) and fits and not plain_kernel_runs(plan)


def efficient_kernel_runs(plan: Plan) -> bool:
    """Return whether a GPU's memory-efficient kernel runs."""
    return on_gpu(plan) and not plain_kernel_runs(plan) and not flash_kernel_runs(plan)


def output_is_by_head(plan: Plan) -> bool:
    """Return whether attention gives its output head by head, or sequence by sequence.

    Where that is merged from pieces of which the first has not all queries it is added up in the
    order of positions.
    """
    capped = plain_kernel_runs(plan)
    if not on_gpu(plan):
        return capped
    pieces = plan.layout.context.record.gathers_keys and plan.placement.ring_degree > 1
    several = plan.layout.microbatch_sequences > 1
    return (capped or (efficient_kernel_runs(plan) and several)) and not pieces
