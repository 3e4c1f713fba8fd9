"""The part of `echelon explain context` that needs no run: the kinds, and facts about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from echelon.cli.output import table
from echelon.core.attention_mask import AttentionMask
from echelon.core.placement import Placement
from echelon.core.plan import ContextKind
from echelon.cost.context_facts import block_activation_bytes, errors_of_a_split, kv_bytes
from echelon.cost.context_resident import resident_chunks
from echelon.cost.context_work import meetings

PLACES = 4
LENGTH = 64
LONG = 128 * 1024
GB, GIB = 1e9, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Say what one kind splits, sends and holds, what must divide, and when it is the one."""

    splits: str
    forward: str
    backward: str
    holds: str
    divides: str
    when: str
    source: str


WAYS: dict[ContextKind, Way] = {
    "ring": Way(
        splits="positions, zigzag: place i has chunks i and 2n-1-i",
        forward="(n-1) KV s, neighbour to neighbour; causal: what is hidden is not sent",
        backward="(n-1) KV s again, and (n-1) KV w of gradients",
        holds="its own chunk, the one at work and the next one",
        divides="2 cp | T",
        when="any degree, any heads; transfers hide where a step works longer than its keys travel",
        source="Liu et al., Ring Attention, 2023",
    ),
    "striped": Way(
        splits="positions, dealt out one by one: place i has i, i+n, i+2n, ...",
        forward="(n-1) KV s, neighbour to neighbour, whatever the mask hides",
        backward="(n-1) KV s again, and (n-1) KV w of gradients",
        holds="its own chunk, the one at work and the next one",
        divides="cp | T",
        when="2 cp does not divide T, or documents are short: each is dealt out over all ranks",
        source="Brandon et al., Striped Attention, 2023",
    ),
    "gathered": Way(
        splits="positions, zigzag",
        forward="(n-1) KV s, an all-gather; windows: the rows within reach, from their owners",
        backward="(n-1) KV s again, and a reduce-scatter of (n-1) KV w",
        holds="all keys and values, twice while they are put in order: grows with T",
        divides="2 cp | T",
        when="few key/value heads beside query heads, any mask, a sequence that fits",
        source="Grattafiori et al., Llama 3, 2024, section 3.3.2",
    ),
    "ulysses": Way(
        splits="positions outside of attention, heads inside",
        forward="(u-1)/u (2 O + KV) s, two all-to-alls",
        backward="the same",
        holds="its queries, keys and values packed and exchanged",
        divides="cp | T, cp | heads / tp",
        when="fast links and enough heads: few bytes at any T, local attention as on one device",
        source="Jacobs et al., DeepSpeed-Ulysses, 2023",
    ),
    "ulysses-ring": Way(
        splits="heads among u neighbours, positions over n = cp / u places of a ring",
        forward="(u-1)/u (2 O + KV) s on fast links, (n-1) KV s on slow ones",
        backward="as both",
        holds="as the ring, of 1/u of the heads",
        divides="2 n | T, cp | T, u | heads / tp",
        when="more ranks than heads, over several nodes: all-to-alls stay within one",
        source="Fang and Zhao, USP, 2024",
    ),
}
"""The kinds, in the letters of `cost/context_memory.py`."""


def ways_json() -> dict[str, Any]:
    """Return the kinds and the facts as JSON values."""
    alone, unweighted, merged = errors_of_a_split()
    full, causal = _met(causal=False), _met(causal=True)
    return {
        "ways": {kind: asdict(way) for kind, way in WAYS.items()},
        "facts": {
            "places": PLACES,
            "pairs": {"full": sum(full), "causal": sum(causal)},
            "pairs_without_a_ring": {"full": full[0], "causal": causal[0]},
            "resident_chunks": {"waiting": _resident(False), "overlapped": _resident(True)},
            "errors": {"own_keys": alone, "added_up": unweighted, "merged": merged},
        },
    }


def ways_text() -> str:
    """Return the page of the kinds, without a run."""
    parts = [
        "Context parallelism: each of cp ranks holds T / cp positions of every sequence, and of\n"
        "all activations, not those of attention alone. The kinds differ in how queries meet keys."
        "\nu ranks exchange heads, n = cp / u are on a ring. Elements of one block and microbatch "
        "on a rank:\nO = B T/c H h queries, KV = 2 B T/n K'/u h keys and values; s bytes of one, "
        "w = max(4, s) of a sum.",
        "\n\n".join("\n".join(_way(kind, way)) for kind, way in WAYS.items()),
        "Three facts\n\n" + "\n".join(_three()),
        "Keys and values of a long sequence, 16 bits, T = 128 x 1024: 2 T K h L s\n\n" + _kv(),
        "The same 80 blocks over N ranks, cut along the sequence or by blocks\n\n" + _cuts(),
        "Sequence parallelism is another thing\n\n" + "\n".join(_sequence()),
        "For your own run: echelon explain context RUN --set mesh.cp=4",
    ]
    return "\n\n".join(parts) + "\n"


def _way(kind: str, way: Way) -> Iterator[str]:
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
    found = meetings(place, AttentionMask(causal=causal), gathered=False)
    return [sum(one.step == step for one in found) for step in range(PLACES)]


def _resident(overlapped: bool) -> float:
    place = Placement(kind="zigzag", ring_degree=PLACES, ulysses_degree=1, length=LENGTH)
    return resident_chunks(place, AttentionMask(causal=False), overlapped=overlapped)


def _three() -> Iterator[str]:
    full, causal = _met(causal=False), _met(causal=True)
    alone, unweighted, merged = errors_of_a_split(ranks=PLACES)
    yield "  1. A query needs the keys of other ranks. With those of its own rank alone,"
    yield f"     {sum(full) - full[0]} of {sum(full)} pairs of chunks on {PLACES} ranks are missing"
    yield f"     ({sum(causal) - causal[0]} of {sum(causal)} under a causal mask); in a small"
    yield f"     example the output is wrong by {alone:.2f}."
    yield "  2. Outputs are never summed over ranks: each rank computes all of its own queries."
    yield "     Keys and values travel forward, and the sums of their gradients backward."
    yield "  3. Parts merge by their log-sum-exp. Added up with equal weights the example is wrong"
    yield f"     by {unweighted:.2f}, merged by {merged:.0e}."
    yield f"  A ring that waits for each transfer holds {_resident(False):g} chunks of keys and"
    yield f"  values, one that overlaps them {_resident(True):g}: its own, that at work, the next."


def _kv() -> str:
    shapes = (
        ("32 blocks, 32 heads of 128 (7B)", 4096, 32),
        ("80 blocks, 64 heads of 128", 8192, 80),
        ("80 blocks, 8 of 64 heads (grouped)", 1024, 80),
    )
    rows = [
        (
            name,
            _both(kv_bytes(LONG, width, 1)),
            _both(kv_bytes(LONG, width, layers)),
            _both(kv_bytes(LONG // 8, width, 1)),
            _both(kv_bytes(LONG // 8, width, layers)),
        )
        for name, width, layers in shapes
    ]
    return table(("", "a block", "all", "a block, N = 8", "all, N = 8"), rows)


def _cuts() -> str:
    rows = [
        (
            ranks,
            f"{kv_bytes(LONG // ranks, 8192, 80) / GIB:g} GiB",
            f"{kv_bytes(LONG // ranks, 8192, 1) / GIB:g} GiB of each of 80",
            f"{kv_bytes(LONG, 8192, 80 // ranks) / GIB:g} GiB",
            f"{kv_bytes(LONG, 8192, 1) / GIB:g} GiB of each of {80 // ranks}",
        )
        for ranks in (1, 2, 4, 8)
    ]
    return table(("N", "sequence", "that is", "by blocks", "that is"), rows)


def _both(count: int) -> str:
    return f"{count / GB:.2f} GB = {count / GIB:g} GiB"


def _sequence() -> Iterator[str]:
    sizes = (2048, 8192, 64)
    whole = block_activation_bytes(*sizes)
    tensor = block_activation_bytes(*sizes, tp=8)
    both = block_activation_bytes(*sizes, tp=8, sequence_parallel=True)
    yield "  It splits what tensor ranks would each hold whole (norms, dropout), not attention:"
    yield f"  a block of T = 2048, D = 8192, 64 heads keeps {whole / 1e6:.1f} MB on one device,"
    yield f"  {tensor / 1e6:.1f} MB on each of 8 tensor ranks, {both / 1e6:.1f} MB with it: 1/8 of"
    yield "  the whole (Korthikanti et al., 2022; scores kept). cp splits all of that once more."
