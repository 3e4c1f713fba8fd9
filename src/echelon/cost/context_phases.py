"""The phases of attention over context ranks: what is there at the same time, forward and backward.

In the letters of `cost/context_memory.py`, which says what is counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.plan import Plan
from echelon.cost.context import gathers_whole, routes_of
from echelon.cost.context_resident import resident_rows
from echelon.cost.context_routes import num_rows
from echelon.cost.context_sizes import Phase, Sizes, term, wide
from echelon.cost.terms import HeldTerm

LSE_COPIES = 4
"""Log-sum-exps that a merge holds at a time: of the piece, their sum, and two on the way to it."""

POSITION_BYTES = 8

SCORE_COLUMNS, MAX_SCORES, SCORE_ROWS = 1024, 2**22, 16
SCORE_COPIES_FORWARD, SCORE_COPIES_BACKWARD = 6, 7
"""How often the plain kernel holds a block of at most MAX_SCORES scores."""

EDGE_ROWS, TILES_PER_WINDOW = 192, 4
EDGE_BYTES = 10
"""What the mask of an edge takes for each of its pairs while it is made: an int64, two bools."""


def forward_phases(plan: Plan, sizes: Sizes, cp_rank: int) -> Iterator[Phase]:
    s, out, keys = sizes.narrow, sizes.out, sizes.keys
    if plan.layout.context.ulysses_degree > 1:
        parts = [term("packed heads", (out + keys) * s, "(O + KV) s")]
        if sizes.copied:
            parts.append(term("copies of key/value heads", keys * s, "KV s"))
        yield Phase(name="forward, heads for positions", terms=tuple(parts))
        packed = term("packed and received output", 2 * out * s, "2 O s")
        yield Phase(name="forward, positions for heads", terms=(packed,))
    merging = (*_merged(plan, sizes), *_kernel(plan, sizes, SCORE_COPIES_FORWARD))
    if plan.layout.context.kind == "gathered":
        yield from _gathering(plan, sizes, cp_rank, "forward")
        yield Phase(name="forward", terms=(_all_keys(plan, sizes, cp_rank), *merging))
        return
    place = plan.placement.ring_place(cp_rank)
    for resident in resident_rows(plan.placement, plan.model.mask, place)[: sizes.places]:
        rows = (resident.keys + resident.key_copies) * sizes.row * s
        blocks = (term("keys of other places", rows, "KV s x blocks"),) if rows else ()
        yield Phase(name=f"forward, step {resident.step}", terms=(*blocks, *merging))


def backward_phases(plan: Plan, sizes: Sizes, cp_rank: int) -> Iterator[Phase]:
    s, out, keys = sizes.narrow, sizes.out, sizes.keys
    exchanged = plan.layout.context.ulysses_degree > 1
    given: tuple[HeldTerm, ...] = ()
    if exchanged:
        given = (term("gradient of the output of own heads", out * s, "O s"),)
        packed = term("gradient of the output, packed", out * s, "O s")
        yield Phase(name="backward, heads for positions", terms=(*given, packed))
    if plan.layout.context.kind == "gathered":
        yield from _backward_gathered(plan, sizes, cp_rank)
    elif sizes.places > 1:
        yield from _backward_ring(plan, sizes, cp_rank, given)
    else:
        several = _several_pieces(plan)
        results = _results(sizes, sizes.rows)
        sums = [wide("gradients", out + keys, sizes, "(O + KV) w")] if several else []
        parts = (*given, *sums, *results, *_kernel(plan, sizes, SCORE_COPIES_BACKWARD))
        yield Phase(name="backward", terms=parts)
    if exchanged:
        # What attention kept is gone by then: its own gradients are in the place of that.
        moved = term("gradients joined, received, given on", 3 * (out + keys) * s, "3 (O + KV) s")
        terms = [moved]
        if sizes.copied:
            summed = keys // sizes.copied
            terms.append(wide("sums of copied heads", summed, sizes, "KV w / copies"))
        yield Phase(name="backward, positions for heads", terms=tuple(terms))


def _backward_ring(
    plan: Plan, sizes: Sizes, cp_rank: int, given: tuple[HeldTerm, ...]
) -> Iterator[Phase]:
    place, s = plan.placement.ring_place(cp_rank), sizes.narrow
    queries = wide("gradient of queries", sizes.out, sizes, "O w")
    kernel = tuple(_kernel(plan, sizes, SCORE_COPIES_BACKWARD))
    for resident in resident_rows(plan.placement, plan.model.mask, place):
        blocks = (resident.keys + resident.key_copies) * sizes.row * s
        gradients = (resident.gradients + resident.gradient_copies) * sizes.row
        own = resident.step in (0, sizes.places)
        terms = (
            *given,
            *((term("keys of other places", blocks, "KV s x blocks"),) if blocks else ()),
            queries,
            wide("gradients of keys", gradients, sizes, "KV w x (own + others)"),
            *_results(sizes, sizes.rows if own else resident.working),
            *kernel,
        )
        yield Phase(name=f"backward, step {resident.step}", terms=terms)
    if sizes.is_narrow:
        sums = wide("sums of gradients", sizes.out + sizes.keys, sizes, "(O + KV) w")
        narrow = term("gradients", (sizes.out + sizes.keys) * s, "(O + KV) s")
        yield Phase(name="backward, the end", terms=(*given, sums, narrow))


def _backward_gathered(plan: Plan, sizes: Sizes, cp_rank: int) -> Iterator[Phase]:
    whole = _all_keys(plan, sizes, cp_rank)
    elements = whole.bytes // sizes.narrow
    queries = wide("gradient of queries", sizes.out, sizes, "O w")
    gradients = wide("gradients of all keys", elements, sizes, "n KV w")
    kernel = _kernel(plan, sizes, SCORE_COPIES_BACKWARD)
    results = _results(sizes, elements // sizes.row)
    yield from _gathering(plan, sizes, cp_rank, "backward")
    yield Phase(name="backward", terms=(whole, queries, gradients, *results, *kernel))
    if gathers_whole(plan):
        received = (sizes.places - 1) * sizes.keys if plan.cluster.backend == "gloo" else 0
        ordered = wide("the same, by their owners", elements, sizes, "n KV w")
        parts = wide("parts of the sum", received + sizes.keys, sizes, "n KV w")
        terms = (whole, queries, gradients, ordered, parts, _positions(plan))
        yield Phase(name="backward, the sum", terms=terms)
    else:
        routes, place = routes_of(plan), plan.placement.ring_place(cp_rank)
        moving = [hop.rows for hop in routes.gradients if place in (hop.source, hop.target)]
        rows = sum(map(num_rows, moving))
        parts = wide("what is packed and arrives", rows * sizes.row, sizes, "rows w")
        yield Phase(name="backward, the sum", terms=(whole, queries, gradients, parts))


def _gathering(plan: Plan, sizes: Sizes, cp_rank: int, name: str) -> Iterator[Phase]:
    whole = _all_keys(plan, sizes, cp_rank)
    again = term("the same, as they came", whole.bytes, whole.formula)
    terms: tuple[HeldTerm, ...] = (whole, again)
    if gathers_whole(plan):
        terms = (*terms, _positions(plan))
    else:
        routes, place = routes_of(plan), plan.placement.ring_place(cp_rank)
        moving = [hop.rows for hop in routes.keys if place in (hop.source, hop.target)]
        packed = sum(num_rows(rows) for rows in moving if len(rows) > 1) * sizes.row
        terms = (*terms, term("what is packed", packed * sizes.narrow, "rows s"))
    yield Phase(name=f"{name}, gathering", terms=terms)


def _all_keys(plan: Plan, sizes: Sizes, cp_rank: int) -> HeldTerm:
    """Return the keys and values that a rank gathers: all, or what its windows reach."""
    place, rows = plan.placement.ring_place(cp_rank), sizes.rows * sizes.places
    if not gathers_whole(plan):
        needs = routes_of(plan).needs
        rows = sizes.rows + sum(
            num_rows(found) for (who, _), found in needs.items() if who == place
        )
    formula = "n KV s" if gathers_whole(plan) else "rows within reach s"
    return term("keys and values of all", rows * sizes.row * sizes.narrow, formula)


def _positions(plan: Plan) -> HeldTerm:
    length = plan.mathematics.sequence_length
    return term("their positions", 2 * length * POSITION_BYTES, "2 T x 8")


def _merged(plan: Plan, sizes: Sizes) -> Iterator[HeldTerm]:
    """Yield what a merge of several pieces holds beside the output that it becomes."""
    if not _several_pieces(plan):
        return
    if sizes.is_narrow:
        yield wide("merged output, and that of a piece", 2 * sizes.out, sizes, "2 O w")
    else:
        yield wide("output of a piece", sizes.out, sizes, "O w")
    yield wide("log-sum-exps of a merge", LSE_COPIES * sizes.lse, sizes, "4 L w")


def _results(sizes: Sizes, key_rows: int) -> Iterator[HeldTerm]:
    """Yield what a kernel's backward gives, and a wide copy of one of it where sums are wide.

    Kernels want the gradient of the output sequence by sequence: several of them are put so.
    """
    keys = key_rows * sizes.row
    if sizes.sequences > 1:
        yield term("gradient of the output, by sequence", sizes.out * sizes.narrow, "O s")
    yield term("gradients of a piece", (sizes.out + keys) * sizes.narrow, "(O + KV) s")
    if sizes.is_narrow:
        yield wide("one of them, wide", max(sizes.out, keys // 2), sizes, "max(O, KV / 2) w")


def _kernel(plan: Plan, sizes: Sizes, copies: int) -> Iterator[HeldTerm]:
    """Yield what a kernel makes for itself that a sequence or a mask decides."""
    model, queries = plan.model, plan.mathematics.sequence_length // sizes.places
    if model.soft_cap is not None:
        per_pair = plan.layout.microbatch_sequences * model.heads // plan.mesh.tp
        per_pair //= plan.layout.context.ulysses_degree
        columns = min(SCORE_COLUMNS, plan.mathematics.sequence_length)
        rows = min(queries, max(SCORE_ROWS, MAX_SCORES // (columns * per_pair)))
        each = copies * per_pair * sizes.wide + EDGE_BYTES
        yield term("scores of a block", rows * columns * each, f"{copies} scores w")
    elif model.window is not None and _hides_keys(plan):
        width = model.window if model.causal else 2 * model.window - 1
        rows = max(EDGE_ROWS, width // TILES_PER_WINDOW)
        columns = rows if width >= TILES_PER_WINDOW * EDGE_ROWS else rows + width
        pairs = min(rows, queries) * min(columns, plan.mathematics.sequence_length)
        yield term("mask of an edge", pairs * EDGE_BYTES, f"pairs x {EDGE_BYTES}")


def _several_pieces(plan: Plan) -> bool:
    """Return whether attention of a rank may be more than one call of a kernel."""
    documents = plan.mathematics.documents == "separate"
    return plan.placement.ring_degree > 1 or documents or _hides_keys(plan)


def _hides_keys(plan: Plan) -> bool:
    """Return whether a window is shorter than the sequence: else it is no window."""
    window = plan.model.window
    return window is not None and window < plan.mathematics.sequence_length
