"""Rectangles: the sweep agrees with counting every element."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from echelon.training.checkpoint.rectangles import Rectangle, covering_problem

SHAPE = (4, 3)


def _elements(piece: Rectangle) -> list[tuple[int, ...]]:
    spans = zip(piece.offset, piece.end, strict=True)
    return list(product(*(range(a, b) for a, b in spans)))


@st.composite
def _pieces(draw: st.DrawFn) -> Rectangle:
    spans = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in SHAPE]
    return Rectangle(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def _halves(piece: Rectangle, cuts: list[tuple[int, int]]) -> list[Rectangle]:
    pieces = [piece]
    for dim, at in cuts:
        split: list[Rectangle] = []
        for one in pieces:
            a, b = one.offset[dim], one.end[dim]
            if a < at < b:
                for lo, hi in ((a, at), (at, b)):
                    offset, shape = list(one.offset), list(one.shape)
                    offset[dim], shape[dim] = lo, hi - lo
                    split.append(Rectangle(tuple(offset), tuple(shape)))
            else:
                split.append(one)
        pieces = split
    return pieces


@given(st.lists(_pieces().filter(lambda piece: piece.numel > 0), max_size=6))
def test_a_fault_is_found_exactly_where_counting_finds_one(pieces: list[Rectangle]) -> None:
    counts = Counter(element for piece in pieces for element in _elements(piece))
    whole = all(counts[place] == 1 for place in product(*map(range, SHAPE)))
    assert (covering_problem(SHAPE, pieces) == "") == whole


@given(st.lists(st.sampled_from([(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)])), st.randoms())
def test_any_cut_of_the_whole_covers_it(cuts: list[tuple[int, int]], dice: object) -> None:
    pieces = _halves(Rectangle((0, 0), SHAPE), cuts)
    dice.shuffle(pieces)  # pyright: ignore[reportAttributeAccessIssue]
    assert covering_problem(SHAPE, pieces) == ""
    if len(pieces) > 1:
        assert "elements" in covering_problem(SHAPE, pieces[1:])


@given(_pieces(), _pieces())
def test_what_is_in_both(left: Rectangle, right: Rectangle) -> None:
    common = left.intersection(right)
    both = set(_elements(left)) & set(_elements(right))
    assert set(_elements(common) if common else []) == both
    if common:
        inner = common.slices_within(left)
        assert [s.stop - s.start for s in inner] == list(common.shape)


def test_pieces_outside_of_the_tensor_or_of_other_dims_are_faults() -> None:
    assert "is not inside" in covering_problem((4,), [Rectangle((1,), (4,))])
    assert "is not inside" in covering_problem((4,), [Rectangle((-1,), (4,))])
    assert "dims" in covering_problem((4,), [Rectangle((0, 0), (4, 1))])
    assert covering_problem((), [Rectangle((), ())]) == ""
    assert "overlap" in covering_problem((), [Rectangle((), ())] * 2)
