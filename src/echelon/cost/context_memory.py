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

    ring, striped   the merged output; the keys at work and on their way (`context_resident.py`);
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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.core.plan import Plan
from echelon.cost.context_phases import backward_phases, forward_phases
from echelon.cost.context_sizes import Phase, Sizes, term
from echelon.cost.terms import HeldTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMemory:
    """Hold what a block keeps for its backward pass, and the phases of both passes."""

    kept: tuple[HeldTerm, ...]
    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that wait for backward."""
        return sum(term.bytes for term in self.kept)

    @property
    def peak(self) -> Phase:
        """Return the phase that holds most beside what is kept."""
        return max((*self.forward, *self.backward), key=lambda phase: phase.bytes)


def attention_memory(plan: Plan, cp_rank: int) -> AttentionMemory:
    """Return what attention of one block and one microbatch holds on a context rank."""
    sizes = Sizes.of(plan)
    return AttentionMemory(
        kept=tuple(_kept(plan, sizes)),
        forward=tuple(forward_phases(plan, sizes, cp_rank)),
        backward=tuple(backward_phases(plan, sizes, cp_rank)),
    )


def most_attention_memory(plan: Plan) -> AttentionMemory:
    """Return the memory of the context rank that holds most at a time."""
    first_of_groups = range(0, plan.mesh.cp, plan.layout.context.ulysses_degree)
    found = [attention_memory(plan, rank) for rank in first_of_groups]
    return max(found, key=lambda memory: memory.peak.bytes)


def _kept(plan: Plan, sizes: Sizes) -> Iterator[HeldTerm]:
    s, exchanged = sizes.narrow, plan.layout.context.ulysses_degree > 1
    if exchanged:
        yield term("queries, keys and values exchanged", (sizes.out + sizes.keys) * s, "(O + KV) s")
    else:
        yield term("queries", sizes.out * s, "O s")
    if sizes.places > 1 or not exchanged:
        yield term("keys and values", sizes.keys * s, "KV s")
    yield term("output", sizes.out * s, "O s")
    if exchanged:
        yield term("output of all heads", sizes.out * s, "O s")
    elif plan.model.soft_cap is not None:
        # The plain kernel gives it head by head: what is handed on may be a copy.
        yield term("output, position by position", sizes.out * s, "O s")
    yield term("log-sum-exp", sizes.lse * sizes.wide, "L w")
