"""Stages of a module, run one after the other in one process, are the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from echelon.core.errors import RunFailed
from echelon.parallel.module.pipeline.chain import BlockChain, follow
from echelon.parallel.module.pipeline.stage import (
    ModuleMicrobatch,
    ModuleStage,
    ModuleStream,
    Window,
    hide,
    show,
)
from tests.parallel.module.pipeline import chains
from tests.parallel.module.pipeline.chains import LOSS, made, tokens

WINDOWS = [
    Window(stage=0, start=0, stop=0, first=True, last=False),
    Window(stage=1, start=0, stop=3, first=False, last=False),
    Window(stage=2, start=3, stop=3, first=False, last=False),
    Window(stage=3, start=3, stop=4, first=False, last=False),
    Window(stage=4, start=4, stop=4, first=False, last=True),
]


def checkpointed(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        y: Any = checkpoint(block, x, use_reentrant=False)
        x = y
    return x


def stages_of(model: Any) -> tuple[BlockChain, list[ModuleStage]]:
    """Return the stages of a module, some of them empty."""
    chain = BlockChain(model, "blocks", guarded=True)
    follow(model, chain, LOSS, tokens(), at=frozenset())
    return chain, [ModuleStage(model, chain, LOSS, one) for one in WINDOWS]


@pytest.mark.parametrize("walk", [None, checkpointed])
def test_stages_are_the_module(walk: Any) -> None:
    whole = made(walk)
    total = LOSS.sum_of(whole(**tokens(1)), tokens(1)) * 0.5
    total.backward()
    model = made(walk)
    _, stages = stages_of(model)
    batch = ModuleMicrobatch(index=0, batch=tokens(1))
    inputs: list[torch.Tensor] = []
    x: torch.Tensor | None = None
    outputs: list[torch.Tensor] = []
    for stage in stages:
        if x is not None:
            x = x.detach().requires_grad_()
            inputs.append(x)
        x = stage(x, batch, scale=0.5)
        outputs.append(x)
    assert torch.equal(outputs[-1], total)
    gradient: torch.Tensor | None = None
    for stage, out in zip(reversed(stages), reversed(outputs), strict=True):
        stage.begin_backward(0)
        out.backward(gradient)
        stage.end_backward()
        gradient = None if stage.first else inputs.pop().grad
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        if name != "extra":
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-13, msg=name)


def leaves_early(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for index, block in enumerate(model.blocks):
        if index == 2 and int(ids[0, 0]) == 0:
            return x
        x = block(x)
    return x


def test_a_forward_that_leaves_early_in_a_later_batch() -> None:
    model = made(leaves_early)
    _, stages = stages_of(model)
    ids = tokens(1)["tokens"].clone()
    ids[0, 0] = 0
    x = torch.zeros(2, 5, 6, dtype=torch.float64)
    with pytest.raises(RunFailed, match=r"ended before blocks\.2"):
        stages[1](x, ModuleMicrobatch(index=0, batch={"tokens": ids}))


def test_the_shape_of_the_stream_comes_from_the_module() -> None:
    model = made()
    chain, _ = stages_of(model)
    stream = ModuleStream(model, chain, LOSS)
    longer = {"tokens": torch.zeros((3, 7), dtype=torch.int64)}
    assert stream.buffer(ModuleMicrobatch(index=0, batch=tokens())).shape == (2, 5, 6)
    assert stream.buffer(ModuleMicrobatch(index=1, batch=longer)).shape == (3, 7, 6)


def test_asking_for_the_shape_of_the_stream_leaves_the_module_as_it_was() -> None:
    def draws(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        model.count += 1
        model.calls = getattr(model, "calls", 0) + 1
        for block in model.blocks:
            x = block(x + torch.rand(()))
        return x

    model: Any = made(draws)
    model.register_buffer("count", torch.zeros(()))
    chain, _ = stages_of(model)
    before, state = (float(model.count), model.calls), torch.get_rng_state()
    stream = ModuleStream(model, chain, LOSS)
    assert stream.buffer(ModuleMicrobatch(index=0, batch=tokens())).shape == (2, 5, 6)
    assert (float(model.count), model.calls) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_without_blocks_has_no_stream() -> None:
    def none(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x if int(ids[0, 0]) == 0 else chains.plain(model, x, ids)

    model = made(none)
    ids = tokens(1)["tokens"].clone()
    ids[0, 0] = 1
    chain = BlockChain(model, "blocks", guarded=True)
    follow(model, chain, LOSS, {"tokens": ids}, at=frozenset())
    stream = ModuleStream(model, chain, LOSS)
    ids[0, 0] = 0
    with pytest.raises(RunFailed, match=r"did not come to blocks\.0"):
        stream.buffer(ModuleMicrobatch(index=0, batch={"tokens": ids}))


def test_hidden_parameters_are_nan_without_memory() -> None:
    model = made()
    named = {"embed": model.embed.weight}
    kept = hide(named)  # pyright: ignore[reportArgumentType]
    assert model.embed.weight.isnan().all()
    assert model.embed.weight.untyped_storage().nbytes() == 8
    show(named, kept)  # pyright: ignore[reportArgumentType]
    assert not model.embed.weight.isnan().any()
