# SPDX-License-Identifier: Apache-2.0
"""What one operator keeps and works with, and the tensors that it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.cost.activations.numbers import Num


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Say what a tensor that is kept takes: its operator, its name, bytes, and their formula."""

    operator: str
    name: str
    bytes: Num
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorMemory:
    """Say what an operator keeps and uses, in bytes.

    Where a forward pass comes again in backward, weight gradients that were put off may run in it.
    """

    name: str
    """The operator."""
    saved: tuple[SavedTensor, ...] = ()
    """What waits from its forward to its backward."""
    kept_for_weight_gradient: tuple[SavedTensor, ...] = ()
    """What waits from B to W, where backward is split."""
    forward: Num = 0
    """The most that there is while it runs forward, beside what operators before it keep."""
    backward: Num = 0
    """The most while it runs backward, beside what it and operators before it keep."""
    backward_split: Num = 0
    """The same in B, beside what of later operators waits for W, too."""
    output_gradient: Num = 0
    """What of `backward` is the gradient of the block's output, which may live on anyway."""
    remade: tuple[SavedTensor, ...] = ()
    """What is not kept: `reader` makes it again, from when on it waits for this operator's
    backward."""
    reader: str = ""
    """The later operator whose backward makes `remade`."""
    again: Num = 0
    """The most while this operator, in its backward, makes again what it reads."""
    deferred: Num = 0
    """What weight gradients keep that are put off until the next gather."""
    deferred_peak: Num = 0
    """The most while those run."""
    early: Num | None = None
    """The bytes that the operator then has; None: all that it has backward."""
    forward_without_graph: Num | None = None
    """`forward` where nothing is kept for backward, if that is less."""
    rerun: Num | None = None
    """What is there when weight gradients that were put off run in a repeated forward pass."""

    @property
    def saved_bytes(self) -> Num:
        """Return the bytes that wait for backward."""
        return total_saved_bytes(self.saved)

    @property
    def remade_bytes(self) -> Num:
        """Return the bytes that are made again."""
        return total_saved_bytes(self.remade)

    @property
    def weight_gradient_bytes(self) -> Num:
        """Return the bytes that wait for W."""
        return total_saved_bytes(self.kept_for_weight_gradient)


def saved_tensors(operator: str, *rows: tuple[str, Num, str]) -> tuple[SavedTensor, ...]:
    """Return tensors of an operator, of their names, bytes and formulas."""
    return tuple(
        SavedTensor(operator=operator, name=name, bytes=size, formula=formula)
        for name, size, formula in rows
    )


def total_saved_bytes(saved: tuple[SavedTensor, ...]) -> Num:
    """Return the bytes of all of them."""
    return sum((one.bytes for one in saved), 0)
