"""What ranks say of activations travels as tables and tensors, and comes back the same."""

from __future__ import annotations

import torch

from echelon.proof.ranks import (
    ObservedActivation,
    activation_tables,
    activation_tensors,
    observe_activations,
    read_activations,
)


def test_activations_are_read_as_they_were_written() -> None:
    live = torch.arange(6.0).view(3, 2)
    one = ObservedActivation(
        rank=3,
        step=1,
        name="layers.0.attention",
        gradient=False,
        recomputed=True,
        tokens_n=torch.tensor([4, 2, 9]),
        values_nW=live,
    )
    (copied,) = observe_activations(3, 1, [one])
    live.zero_()
    assert float(copied.values_nW.sum()) == 15.0
    written = activation_tables([copied]), activation_tensors([copied])
    (read,) = read_activations(3, *written)
    assert (read.rank, read.step, read.name, read.recomputed) == (3, 1, one.name, True)
    assert torch.equal(read.values_nW, copied.values_nW)
    assert torch.equal(read.tokens_n, one.tokens_n)
