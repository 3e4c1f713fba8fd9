"""The bytes of a pair of layers, by hand; what ranks really send is in tests/parallel/module."""

from __future__ import annotations

from echelon.cost.bytes.modules.tensor import module_tensor_bytes
from echelon.layout.modules.tensor import UNSPLIT, ModuleSplit, SequenceRegion, SplitLayer

UP = SplitLayer(name="b.up", kind="column", layer="linear", inputs=6, outputs=8, entry="b#0")
GATE = SplitLayer(name="b.gate", kind="column", layer="linear", inputs=6, outputs=8, entry="b#0")
DOWN = SplitLayer(name="b.down", kind="row", layer="linear", inputs=8, outputs=6, entry="b.down")


def split(sequence: SequenceRegion | None = None) -> ModuleSplit:
    """Return a gated pair over two ranks."""
    layers = (UP, GATE, DOWN)
    return ModuleSplit(degree=2, pieces=(), layers=layers, summed=frozenset(), sequence=sequence)


def test_a_pair_sends_one_sum_each_way() -> None:
    one_sum = 2 * 10 * 4 * 6 // 2
    assert module_tensor_bytes(split(), 10, 4) == 2 * one_sum
    assert module_tensor_bytes(split(), 10, 4, backward=False) == one_sum


def test_along_the_sequence_it_sends_as_much_in_halves_and_the_ends() -> None:
    half = 10 * 4 * 6 // 2
    region = SequenceRegion(blocks=("b",), width=6)
    assert module_tensor_bytes(split(region), 10, 4) == 4 * half + 2 * half


def test_one_rank_sends_nothing() -> None:
    assert module_tensor_bytes(UNSPLIT, 10, 4) == 0
