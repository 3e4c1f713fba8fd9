"""Flat buckets: values move into them and stay, and only what is counted is in the norm."""

from __future__ import annotations

import torch

from tests.parallel.buckets import by_hand, matrix


def test_values_move_into_buckets_and_stay_the_same() -> None:
    q, norm = matrix(4, 3), matrix(3)
    before = q.detach().clone()
    (bucket,) = by_hand({"norm": norm, "q": q}, [["norm", "q"]], padding=2)
    assert torch.equal(q, before)
    assert q.data_ptr() == bucket.values.data_ptr()
    assert [(slot.spec.name, slot.start, slot.end) for slot in bucket.slots] == [
        ("q", 0, 12),
        ("norm", 12, 15),
    ]
    assert bucket.values.numel() == bucket.gradients.numel() == 17
    assert not bucket.values[15:].any()
    assert bucket.segments() == [(slice(0, 12), True), (slice(12, 15), False)]
    bucket.values.fill_(3)
    assert q.eq(3).all()


def test_only_what_is_counted_is_in_the_norm_and_neighbours_are_one_range() -> None:
    parameters = {name: matrix(2, 2) for name in "abcd"}
    (bucket,) = by_hand(parameters, [list("abcd")], counted={"c": False})
    assert bucket.counted_ranges() == [slice(0, 8), slice(12, 16)]
    (flat,) = by_hand({"n": matrix(5)}, [["n"]])
    assert flat.segments() == [(slice(0, 5), False)]
