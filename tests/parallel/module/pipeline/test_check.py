"""Each stage run alone shows what a trace does not: planted dependences are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.errors import ConfigError
from echelon.parallel.module.pipeline.chain import BlockChain
from echelon.parallel.module.pipeline.check import check_stages, stages_of_parameters
from echelon.parallel.module.pipeline.stage import ModuleStage, Window
from echelon.parallel.module.pipeline.trace import follow, leaving_no_trace
from tests.parallel.module.pipeline.chains import LOSS, made, tokens

STAGES = ((0,), (1, 2), (3,))
WINDOWS = [
    Window(stage=0, start=0, stop=1, first=True, last=False),
    Window(stage=1, start=1, stop=3, first=False, last=False),
    Window(stage=2, start=3, stop=4, first=False, last=True),
]


def checked(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the stages of parameters, after every stage was run alone."""
    chain, named = BlockChain(model, "blocks", guarded=True), dict(model.named_parameters())
    with leaving_no_trace(model):
        trace = follow(model, chain, LOSS, tokens(), at=frozenset((0, 1, 3, 4)))
        stages_of = stages_of_parameters(chain, trace, named, STAGES)
        stages = [ModuleStage(model, chain, LOSS, one) for one in WINDOWS]
        check_stages(named, stages, trace, stages_of)
    return stages_of


def test_a_chain_passes_and_keeps_its_values() -> None:
    model = made()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    found = checked(model)
    assert found["embed.weight"] == (0,)
    assert found["blocks.2.bias"] == (1,)
    assert found["norm.weight"] == (2,)
    assert found["extra"] == (0,)  # nothing uses it
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name])


def dropout_in_training(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = torch.nn.functional.dropout(block(x), 0.5)
    return x


def test_random_numbers_are_those_of_the_whole_module() -> None:
    assert checked(made(dropout_in_training))["norm.bias"] == (2,)


def hidden_residual(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    first = x.detach()
    for block in model.blocks:
        x = block(x) + first
    return x


def sum_of_all(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for block in model.blocks:
        x = block(x)
        total = total + x
    return total


def adds_what_blocks_say(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    said: list[torch.Tensor] = []
    kept = [
        block.register_forward_hook(lambda _, __, y: said.append(y.square().mean()))
        for block in model.blocks
    ]
    for block in model.blocks:
        x = block(x)
    for one in kept:
        one.remove()
    return x + torch.stack(said).sum()


@pytest.mark.parametrize("walk", [hidden_residual, sum_of_all, adds_what_blocks_say])
def test_a_dependence_on_another_stage_is_found(walk: Any) -> None:
    with pytest.raises(ConfigError, match="module-chain") as caught:
        checked(made(walk))
    assert "run alone" in str(caught.value)
    assert "NaN" in str(caught.value)


def test_parameters_that_several_stages_share() -> None:
    model = made()
    model.blocks[1].weight = model.blocks[0].weight
    with pytest.raises(ConfigError, match="module-shared") as caught:
        checked(model)
    assert "stages 0, 1" in str(caught.value)
    model = made()
    model.blocks[2].weight = model.blocks[1].weight
    assert checked(model)["blocks.1.weight"] == (1,)
