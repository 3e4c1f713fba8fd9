"""Bugs in products whose rows go around the tensor ranks in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.parallel import tensor_overlap
from echelon.parallel.transport.collectives import Pending
from tests.proof.layouts import layout
from tests.proof.mutants.planting import Told, mutant

TP2: dict[str, Any] = {"tp": 2}


def chunked(**chosen: Any) -> Plan:
    """Return a plan whose rows go around a ring of tensor ranks."""
    plan = layout(sequence_parallel=True, **chosen)
    return replace(plan, layout=replace(plan.layout, tp_overlap="ring"))


class _Waited(Pending):
    """A message of which something more is done once it is there."""

    def __init__(self, pending: Pending, then: Callable[[], object]) -> None:
        super().__init__()
        self._pending, self._then = pending, then

    def wait(self) -> None:
        """Wait for the message, then do the rest."""
        self._pending.wait()
        self._then()


def _on_messages(
    patch: pytest.MonkeyPatch, name: str, then: Callable[[torch.Tensor, Pending], Pending]
) -> None:
    """Change what becomes of every message of a product, whose memory is given."""
    pass_on = tensor_overlap._pass_on

    def changed(sent: torch.Tensor, received: torch.Tensor, group: Any, called: str) -> Pending:
        pending = pass_on(sent, received, group, called)
        return then(received, pending) if called.startswith(name) else pending

    patch.setattr(tensor_overlap, "_pass_on", changed)


@mutant(
    Told("prove-activations", "layers.0.attention", "chunk", "tp", plan=TP2, of=chunked),
)
def chunk_of_a_sum_added_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add what came of a row layer's sum twice."""
    _on_messages(
        patch, "row.forward", lambda came, pending: _Waited(pending, lambda: came.mul_(2.0))
    )


@mutant(
    Told("prove-gradients", "layers.1.mlp_norm", "none", plan=TP2, of=chunked),
)
def chunk_of_a_gradient_added_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add what came of a column layer's input gradient twice."""
    _on_messages(
        patch, "column.backward", lambda came, pending: _Waited(pending, lambda: came.mul_(2.0))
    )


@mutant(
    Told("prove-activations", "layers.0.attention", "rows of a chunk", "tp", plan=TP2, of=chunked),
)
def chunk_multiplied_with_the_wrong_rows(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Put the product of each chunk of a column layer into the rows of the next rank."""
    passing = tensor_overlap._passing_chunks

    def shifted(own: Any, group: Any, name: str, whole: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for owner, chunk in passing(own, group, name, whole):
            wrong = name == "column.forward"
            yield ((owner + 1) % group.size if wrong else owner), chunk

    patch.setattr(tensor_overlap, "_passing_chunks", shifted)


@mutant(
    Told("prove-gradients", "layers.1.mlp_norm", "none", plan=TP2, of=chunked),
)
def gradient_chunk_of_the_wrong_rows(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Begin each sum of input gradients with the rows of another rank."""
    rows_of = tensor_overlap._rows_of
    scatter = tensor_overlap.RingOverlap.product_scatter

    def changed(self: Any, x: torch.Tensor, product: Any, group: Any, *, name: str) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as inside:
            if name == "column.backward":
                inside.setattr(
                    tensor_overlap,
                    "_rows_of",
                    lambda owner, rows, group: rows_of((owner + 1) % group.size, rows, group),
                )
            return scatter(self, x, product, group, name=name)

    patch.setattr(tensor_overlap.RingOverlap, "product_scatter", changed)


@mutant(
    Told(
        "prove-awaited",
        "exchange column.forward.1",
        "used before it was awaited",
        "tp",
        plan=TP2,
        late=True,
        of=chunked,
    )
)
def chunk_multiplied_before_it_came(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Never wait for the chunks that a column layer multiplies."""
    _on_messages(patch, "column.forward", lambda came, pending: Pending())


@mutant(
    Told(
        "prove-in-flight",
        "exchange row.forward.1",
        "changed in flight",
        "tp",
        plan=TP2,
        late=True,
        of=chunked,
    )
)
def chunk_changed_while_it_is_sent(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take the memory of a partial sum for something else while it is sent."""
    pass_on = tensor_overlap._pass_on

    def reused(sent: torch.Tensor, received: torch.Tensor, group: Any, name: str) -> Pending:
        pending = pass_on(sent, received, group, name)
        if name.startswith("row.forward"):
            sent.zero_()
        return pending

    patch.setattr(tensor_overlap, "_pass_on", reused)
