# SPDX-License-Identifier: Apache-2.0
"""The part of `echelon explain context` that needs no run: the kinds, and facts about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from echelon.core.attention_mask import AttentionMask, Placement
from echelon.core.choices.context_kinds import CONTEXT_KINDS, ContextKindFacts
from echelon.core.units import GIB, binary_bytes
from echelon.cost.activations.closed_forms import gpt_block_bytes
from echelon.cost.bytes.model_sizes import attention_merge_errors, kv_bytes
from echelon.layout.context_resident import resident_chunks
from echelon.layout.context_work import chunk_pairs
from echelon.planner.view.text_layout import WIDTH, flow_text, table, wrap_text

PLACES = 4  # context ranks
LENGTH = 64  # tokens
LONG = 128 * 1024  # tokens


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
        + _kv(columns=columns),
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


def _kv(*, columns: int) -> str:
    shapes = (
        ("32 blocks, 32 heads of 128 (7B)", 4096, 32),
        ("80 blocks, 64 heads of 128", 8192, 80),
        ("80 blocks, 8 of 64 heads (grouped)", 1024, 80),
    )
    rows = [
        (
            name,
            *(_in_gib(kv_bytes(LONG // n, width, count)) for n in (1, 8) for count in (1, layers)),
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


def _in_gib(count: int) -> str:
    return f"{count / GIB:g} GiB"


def _sequence() -> Iterator[str]:
    sizes = (2048, 8192, 64)
    whole = gpt_block_bytes(*sizes)
    tensor = gpt_block_bytes(*sizes, tp=8)
    both = gpt_block_bytes(*sizes, tp=8, sequence_parallel=True)
    yield "  It splits what tensor ranks would each hold whole (norms, dropout), not attention:"
    yield f"  a block of T = 2048, D = 8192, 64 heads keeps {binary_bytes(whole)} on one device,"
    yield f"  {binary_bytes(tensor)} on each of 8 tensor ranks, {binary_bytes(both)} with it:"
    yield "  1/8 of the whole (Korthikanti et al., 2022; scores kept). cp splits all of it again."
