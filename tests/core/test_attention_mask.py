"""The closed forms of a mask against counting pairs one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.core.attention_mask import AttentionMask, PositionRun

RUNS = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)).flatmap(
    lambda first: st.tuples(
        st.builds(PositionRun, st.just(first[0]), st.just(first[2]), st.integers(0, 9)),
        st.builds(PositionRun, st.just(first[1]), st.just(first[2]), st.integers(0, 9)),
    )
)
MASKS = st.builds(
    AttentionMask, causal=st.booleans(), window=st.one_of(st.none(), st.integers(1, 12))
)


@given(runs=RUNS, mask=MASKS)
def test_a_band_is_the_rule_of_the_mask(
    runs: tuple[PositionRun, PositionRun], mask: AttentionMask
) -> None:
    queries, keys = runs
    band = mask.band(queries, keys)
    seen = {
        (i, j)
        for i in range(queries.count)
        for j in range(keys.count)
        if mask.allows(queries.position(i), keys.position(j))
    }
    places = [(i, j) for i in range(queries.count) for j in range(keys.count)]
    assert seen == {(i, j) for i, j in places if band.allows(i, j)}
    assert band.num_pairs(queries.count, keys.count) == len(seen)
    assert band.covers(queries.count, keys.count) == (len(seen) == len(places))
    met = sorted({j for _, j in seen})
    first, last = band.keys(queries.count, keys.count)
    assert (first, last) == ((met[0], met[-1] + 1) if met else (0, 0))


@given(
    run=st.builds(PositionRun, st.integers(0, 9), st.integers(1, 4), st.integers(0, 9)),
    data=st.data(),
)
def test_a_range_of_positions_is_a_range_of_indices(run: PositionRun, data: st.DataObject) -> None:
    start, stop = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    first, last = run.between(start, stop)
    inside = [i for i in range(run.count) if start <= run.position(i) < stop]
    assert list(range(first, last)) == inside


def test_the_pairs_of_a_whole_sequence() -> None:
    assert AttentionMask().num_pairs(8) == 36
    assert AttentionMask(causal=False).num_pairs(8) == 64
    assert AttentionMask(window=3).num_pairs(8) == 1 + 2 + 3 * 6
    assert AttentionMask(causal=False, window=1).num_pairs(8) == 8
