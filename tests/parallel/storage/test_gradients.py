"""Where gradients lie: flat buckets, written, added to, joined, and reported as they fill."""

from __future__ import annotations

import torch

from echelon.parallel.storage.buckets import Bucket, Slot
from echelon.parallel.storage.gradients import GradientStore, add_rows
from tests.parallel.buckets import Called, Noted, by_hand, matrix, store_of


def make_store() -> tuple[GradientStore, list[str], list[Bucket]]:
    """Return a store of three matrices and a norm in two buckets, and the list of full ones."""
    parameters = {"q": matrix(4, 3), "k": matrix(2, 3, seed=1), "o": matrix(3, 4, seed=2)}
    parameters["norm"] = matrix(3, seed=3)
    buckets = by_hand(parameters, [["q", "norm", "k"], ["o"]], padding=1)
    full: list[str] = []
    store = GradientStore(Noted(full))
    store.hold(buckets)
    store.start_step()
    return store, full, buckets


def test_the_first_microbatch_overwrites_and_the_others_add() -> None:
    store, _, buckets = make_store()
    q, k, o, norm = (slot.parameter for slot in sorted_slots(buckets))
    for bucket in buckets:
        bucket.gradients.fill_(99)
    expected = {
        name: torch.zeros_like(one) for name, one in zip("qkon", (q, k, o, norm), strict=True)
    }
    for microbatch in range(3):
        store.start_backward(last=microbatch == 2)
        dy, x = matrix(5, 6, seed=microbatch), matrix(5, 3, seed=10 + microbatch)
        store.add_matmul([q, k], dy.detach(), x.detach())
        expected["q"] += dy[:, :4].t() @ x
        expected["k"] += dy[:, 4:].t() @ x
        store.add(norm, x[0].detach())
        expected["n"] += x[0]
        rows = torch.tensor([1, 1, 2])
        store.add_rows(o, rows, dy[:3, :4].detach())
        expected["o"].index_add_(0, rows, dy[:3, :4])
    for slot, name in zip(sorted_slots(buckets), "qkon", strict=True):
        torch.testing.assert_close(slot.gradient, expected[name].detach())


def sorted_slots(buckets: list[Bucket]) -> list[Slot]:
    """Return the slots of q, k, o and the norm."""
    by_name = {slot.spec.name: slot for bucket in buckets for slot in bucket.slots}
    return [by_name[name] for name in ("q", "k", "o", "norm")]


def test_matrices_side_by_side_are_one_matrix() -> None:
    store, _, buckets = make_store()
    q, k, o, _ = (slot.parameter for slot in sorted_slots(buckets))
    joined = store.matrices([q, k])
    assert joined is not None
    assert torch.equal(joined, torch.cat([q, k]))
    assert joined.data_ptr() == q.data_ptr()
    assert store.matrices([k, q]) is None
    assert store.matrices([q, o]) is None
    assert store.matrices([q, k]) is joined


def test_matrices_apart_get_their_own_products() -> None:
    a, b = matrix(2, 3), matrix(4, 3, seed=1)
    between = matrix(1, 5, seed=2)
    store = store_of({"a": a, "between": between, "b": b})
    assert store.matrices([a, b]) is None
    dy, x = matrix(5, 6).detach(), matrix(5, 3, seed=7).detach()
    store.start_backward(last=True)
    store.add_matmul([a, b], dy, x)
    gradients = {slot.spec.name: slot.gradient for slot in store.buckets[0].slots}
    torch.testing.assert_close(gradients["a"], dy[:, :2].t() @ x)
    torch.testing.assert_close(gradients["b"], dy[:, 2:].t() @ x)
    assert not gradients["between"].any()


def test_a_bucket_is_full_with_its_last_contribution_of_the_last_microbatch() -> None:
    store, full, buckets = make_store()
    q, k, o, norm = (slot.parameter for slot in sorted_slots(buckets))
    dy, x = torch.ones(5, 6, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64)
    for last in (False, True):
        store.start_backward(last=last)
        store.add(norm, x[0])
        store.add(o, o.detach())
        assert full == (["bucket1"] if last else [])
        store.add_matmul([q, k], dy, x)
    assert full == ["bucket1", "bucket0"]


def test_a_parameter_that_is_used_twice_is_full_after_both_uses() -> None:
    tied = matrix(6, 2)
    full: list[str] = []
    store = GradientStore(Noted(full))
    buckets = by_hand({"tied": tied}, [["tied"]], uses={"tied": 2})
    store.hold(buckets)
    for _ in range(2):
        store.start_step()
        store.start_backward(last=True)
        dy, x = matrix(3, 6, seed=1).detach(), matrix(3, 2, seed=2).detach()
        store.add_matmul([tied], dy, x)
        assert full == []
        store.add_rows(tied, torch.tensor([5, 0, 5]), x)
        assert full == ["bucket0"]
        full.clear()
        expected = (dy.t() @ x).index_add_(0, torch.tensor([5, 0, 5]), x)
        torch.testing.assert_close(buckets[0].slots[0].gradient, expected)


def test_a_product_in_parts_is_one_contribution() -> None:
    store, full, buckets = make_store()
    o = sorted_slots(buckets)[2].parameter
    buckets[1].gradients.fill_(99)
    dy, x = matrix(5, 3).detach(), matrix(5, 4, seed=7).detach()
    for microbatch in range(2):
        store.start_backward(last=microbatch == 1)
        assert store.takes_parts(o)
        store.add_matmul([o], dy[:2], x[:2], more=True)
        store.add_matmul([o], dy[2:3], x[2:3], more=True)
        assert full == []
        store.add_matmul([o], dy[3:], x[3:])
    assert full == ["bucket1"]
    torch.testing.assert_close(sorted_slots(buckets)[2].gradient, 2 * dy.t() @ x)


def test_parts_are_not_for_what_waits_or_would_be_rounded_each_time() -> None:
    store, _, buckets = make_store()
    o = sorted_slots(buckets)[2]
    with store.collects():
        assert not store.takes_parts(o.parameter)
    assert store.takes_parts(o.parameter)
    o.gradient = o.gradient.bfloat16()
    assert not store.takes_parts(o.parameter)


def test_deferred_work_runs_once_in_order() -> None:
    store, _, _ = make_store()
    done: list[int] = []
    for index in range(3):
        store.defer(lambda index=index: done.append(index))
    assert done == []
    store.run_deferred()
    store.run_deferred()
    assert done == [0, 1, 2]


def test_rows_are_added_in_one_order_on_a_gpu() -> None:
    """`index_add_` adds in any order there: the sum of what goes to one row would differ."""
    total, added = (torch.empty((rows, 2), device="meta") for rows in (6, 3))
    rows = torch.empty(3, dtype=torch.long, device="meta")
    with Called() as called:
        add_rows(total, rows, added)
    assert called.names == ["aten::index_put_"]
