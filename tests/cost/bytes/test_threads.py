"""Rows of replicas on threads, as `torch.chunk` cuts them, and the bytes of a step by hand."""

from __future__ import annotations

import torch

from echelon.cost.bytes.threads import ByRows, ThreadedPass, ThreadedStep, replica_rows, step_bytes


def test_rows_are_those_of_chunks() -> None:
    for rows in range(1, 20):
        for replicas in range(1, 7):
            chunks = torch.zeros(rows).chunk(replicas)
            assert replica_rows(rows, replicas) == tuple(map(len, chunks))
    assert replica_rows(0, 3) == (0,)


def test_a_step_of_a_module_counts_what_is_not_the_primarys() -> None:
    """Four replicas; 10 rows are 3, 3, 3, 1, and 2 rows are two replicas' with one each."""
    full = ThreadedPass(
        rows=10,
        inputs=ByRows(cut=100, each=8),
        outputs=ByRows(cut=50),
        seeds=ByRows(cut=50),
        gradients=1000,
        input_gradients=ByRows(each=8),
    )
    last = ThreadedPass(rows=2, inputs=ByRows(cut=20, each=8), outputs=ByRows(cut=10))
    step = ThreadedStep(replicas=4, state=1200, passes=[last, full])
    assert {term.name: term.bytes for term in step_bytes(step)} == {
        "replicate": 3 * 1200,
        "scatter": 70 + 3 * 8 + 10 + 8,
        "gather": 35 + 5,
        "seeds": 35,
        "gradients": 3 * 1000,
        "input gradients": 3 * 8,
    }
    alone = ThreadedStep(replicas=1, state=1200, passes=[full])
    assert {term.bytes for term in step_bytes(alone)} == {0}
    assert {term.axis for term in step_bytes(step)} == {"threads"}
