# SPDX-License-Identifier: Apache-2.0
"""Bytes that a module sends over its tensor ranks: N tokens of a microbatch, s bytes an element.

Letters: N tokens, n tensor ranks, I inputs, O outputs, D the width of the stream, l bytes of what
losses are computed in.

    whole stream        forward                       backward
    entry of columns    -                             all-reduce of N I
    row                 all-reduce of N O             -
    column-gathered     all-gather of N O/n           -
    row-scattered       all-reduce of N O             all-gather of N I/n
    embedding           all-reduce of N O             -
    head                all-gather of N O/n           all-reduce of N I
    head, split loss    all-gather of 3 N l           all-reduce of N I

    in the blocks, where the stream is cut along the sequence
    entry of columns    all-gather of N/n I           reduce-scatter of N/n I
    row                 reduce-scatter of N/n O       all-gather of N/n O
    the first block     -                             all-gather of N/n D
    after the last      all-gather of N/n D           -

Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., 2022, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.cost.bytes.terms import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from echelon.layout.modules.tensor import CUT_INPUTS, CUT_OUTPUTS, ModuleSplit, SplitLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Say which modules a pipeline stage runs; None are all."""

    modules: tuple[str, ...] | None = None
    first: bool = True
    last: bool = True

    def holds(self, name: str) -> bool:
        """Return whether a layer is in one of the modules."""
        within = (name == one or name.startswith(f"{one}.") for one in self.modules or ())
        return self.modules is None or any(within)


WHOLE = StageLayers()
"""A module that is not cut into stages."""


def module_tensor_bytes(
    split: ModuleSplit,
    tokens: int,
    element_bytes: int,
    *,
    backward: bool = True,
    stage: StageLayers = WHOLE,
    loss_bytes: int | None = None,
) -> int:
    """Return the bytes that a rank sends in a forward and, unless told, its backward.

    `tokens` are the positions of all sequences of the microbatch, of which tensor ranks see the
    same. Gradients of `split.summed` come once a step, and are those of `module_bytes`.
    A pipeline stage sends what its own layers do. `loss_bytes` are those of a number that a loss is
    computed in, where it takes the columns of each rank; otherwise logits are gathered.
    """
    if split.degree == 1:
        return 0
    ahead, back, entries = 0, 0, set[str]()
    for one in split.layers:
        if not stage.holds(one.name):
            continue
        cut = split.sequence is not None and split.sequence.holds(one.name)
        forward, behind = _layer(one, split.degree, tokens * element_bytes, cut=cut)
        if loss_bytes is not None and _is_head(one):
            forward = all_gather_bytes(3 * tokens * loss_bytes, split.degree)
        ahead, back = ahead + forward, back + behind
        if (one.kind in CUT_OUTPUTS or _is_head(one)) and one.entry not in entries:
            entries.add(one.entry)
            size = tokens * element_bytes * one.inputs
            if cut:
                ahead += all_gather_bytes(size // split.degree, split.degree)
                back += reduce_scatter_bytes(size // split.degree, split.degree)
            else:
                back += all_reduce_bytes(size, split.degree)
    if split.sequence is not None:
        size = tokens * element_bytes * split.sequence.width // split.degree
        ahead += all_gather_bytes(size, split.degree) * stage.last
        back += all_gather_bytes(size, split.degree) * stage.first
    return ahead + (back if backward else 0)


def _layer(one: SplitLayer, degree: int, column_bytes: int, *, cut: bool) -> tuple[int, int]:
    """Return what a layer sends of its outputs forward, and of what it is given backward.

    `column_bytes` are those of one column of all tokens.
    """
    inputs, outputs = column_bytes * one.inputs, column_bytes * one.outputs
    if one.kind == "column-gathered" or _is_head(one):
        return all_gather_bytes(outputs // degree, degree), 0
    if one.kind in CUT_INPUTS:
        back = all_gather_bytes(inputs // degree, degree) if one.kind == "row-scattered" else 0
        if not cut:
            return all_reduce_bytes(outputs, degree), back
        piece = outputs // degree
        return (
            reduce_scatter_bytes(piece, degree),
            back + all_gather_bytes(piece, degree),
        )
    if one.kind == "vocabulary":
        return all_reduce_bytes(outputs, degree), 0
    return 0, 0


def _is_head(one: SplitLayer) -> bool:
    return one.kind == "vocabulary" and one.layer == "linear"
