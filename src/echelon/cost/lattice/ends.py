"""Seconds of the ends of a model for one microbatch: the embedding, and the head with the loss.

The head is a product of [N, h] by [h, V / t], and twice that backward; logits are widened, and read
and written several times for a maximum, a sum of exponentials and their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.cost.lattice.block import Work, own_way
from echelon.cost.lattice.numbers import Num
from echelon.cost.lattice.products import moved_seconds, product_seconds
from echelon.cost.lattice.travel import reduce_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSeconds:
    """Give the seconds of forward and backward of the embedding and of the head."""

    embedding: Num
    head_forward: Num
    head_backward: Num


def end_seconds(work: Work) -> EndSeconds:
    """Return the seconds of embedding and head for one microbatch on one rank."""
    model, layout, software = work.model, work.layout, work.software
    # Where products are done in fp8, those of the head are not.
    machine = replace(work.machine, peak_flops=work.machine.attention_flops)
    tokens, columns = work.tokens, model.vocab / layout.tp
    forward = product_seconds(machine, tokens, model.hidden, columns, work.element)
    inputs = product_seconds(machine, tokens, columns, model.hidden, work.element)
    weights = product_seconds(machine, model.hidden, tokens, columns, work.element)
    logits = moved_seconds(machine, 0.5 * software.logit_bytes * tokens * columns)
    rows = work.element * tokens * model.hidden
    way = own_way(work, layout.tp, 1.0)
    joined = reduce_seconds(way, rows)
    small = 3.0 * reduce_seconds(way, 4.0 * tokens)
    return EndSeconds(
        embedding=moved_seconds(machine, 7.0 * rows) + joined,
        head_forward=forward + logits + small,
        head_backward=inputs + weights + logits + joined,
    )
