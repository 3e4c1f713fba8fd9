"""Addresses of tensors, parts of them, and poison."""

from __future__ import annotations

import pytest
import torch

from echelon.parallel.completion.memory import (
    is_poison,
    overlap,
    poison,
    private_copy,
    same_bits,
    span_of,
    storage_of,
    touches,
    without,
)

ALL_DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def test_a_span_reaches_from_the_first_element_to_the_last() -> None:
    x = torch.zeros(4, 6, dtype=torch.float64)
    start = x.data_ptr()
    assert span_of(x) == (start, start + 192)
    assert span_of(x[1:3, 2:4]) == (start + 8 * 8, start + 8 * 16)
    assert span_of(x[:0]) == (0, 0)
    assert storage_of(x[2:]) == storage_of(x)


def test_spans_that_only_meet_do_not_overlap() -> None:
    assert overlap((0, 8), (7, 9))
    assert not overlap((0, 8), (8, 16))


def test_columns_beside_a_span_do_not_touch_it() -> None:
    x = torch.zeros(4, 6)
    right = span_of(x[1, 4:])
    assert touches(x[:, 3:5], right)
    assert not touches(x[:, :4], right)
    assert not touches(x[:, :2].t(), right)
    assert touches(x, right)


def test_what_an_output_has_in_common_with_an_input_is_left_out() -> None:
    whole = torch.arange(8.0)
    parts = without(whole, [whole[2:4], torch.zeros(3)])
    assert [part.tolist() for part in parts] == [[0.0, 1.0], [4.0, 5.0, 6.0, 7.0]]
    assert without(whole, [whole]) == []
    assert [part.numel() for part in without(whole, [])] == [8]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_poison_is_no_number_and_no_index(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype)
    assert not is_poison(x)
    poison(x)
    assert is_poison(x)
    if dtype.is_floating_point:
        assert x.double().isnan().all()
    elif dtype.is_signed:
        assert (x < -(10**6)).all()


def test_poison_does_not_count_as_a_change_for_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * x
    poison(x)
    y.sum().backward()  # x was saved: a change that counts would be refused
    assert x.grad is not None


def test_bits_are_compared_and_not_values() -> None:
    zero, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    nan = torch.tensor([float("nan")])
    assert not same_bits(zero, minus)
    assert same_bits(nan, private_copy(nan))
