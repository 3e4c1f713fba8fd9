"""What passes between the parts of a decoder is heard, by name and in order."""

from __future__ import annotations

import torch

from echelon.core.model_shape import ModelShape
from echelon.models.batch import TokenBatch
from echelon.models.decoder import INPUT, OUTPUT, PARTS, Decoder, listen_to_boundaries
from tests.models.test_decoder import batch, decoder
from tests.parallel.layouts import NANO


def block_boundaries(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Return the boundaries of a block, in the order of the forward pass."""
    there = {"attention", "mlp", *shape.norms}
    parts = (part for part in PARTS if part in there)
    return tuple(f"layers.{layer}.{part}" for part in (INPUT, *parts, OUTPUT))


def test_every_boundary_is_heard_in_the_order_of_the_forward_pass() -> None:
    model, tokens = decoder(NANO), batch(NANO)
    heard: list[tuple[str, torch.Tensor, TokenBatch]] = []
    handles = listen_to_boundaries(model, lambda *what: heard.append(what))
    model(None, tokens)
    names = [name for name, _, _ in heard]
    blocks = [name for layer in range(NANO.layers) for name in block_boundaries(NANO, layer)]
    assert names == [*blocks, "norm"]
    assert all(of is tokens for _, _, of in heard)
    values = {name: value for name, value, _ in heard}
    assert torch.equal(values["layers.0.output"], values["layers.1.input"])
    streams = values["layers.0.input"] + values["layers.0.attention"] + values["layers.0.mlp"]
    assert torch.allclose(streams, values["layers.0.output"])
    for handle in handles:
        handle.remove()
    model(None, tokens)
    assert len(heard) == len(names)


def test_a_stage_without_blocks_is_heard() -> None:
    whole, tokens = decoder(NANO), batch(NANO)
    stage = Decoder(NANO, blocks=[], first=False).double()
    stage.norm.weight.data.copy_(whole.norm.weight.data)
    stage.head.weight.data.copy_(whole.head.weight.data)
    heard: list[str] = []
    listen_to_boundaries(stage, lambda name, *_: heard.append(name))
    stage(torch.ones(tokens.tokens_N.numel(), NANO.hidden, dtype=torch.float64), tokens)
    assert heard == ["norm"]
