"""The calls of blocks go to a handler, and are refused where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError, RunFailed
from echelon.parallel.module.pipeline.chain import BlockCall, BlockChain, find_blocks, stream_of
from tests.parallel.module.pipeline.chains import made, tokens


class Doubling:
    """Give every block its input, doubled."""

    def call(self, index: int, call: BlockCall) -> Any:
        return call.x * 2


def test_a_handler_takes_the_place_of_blocks() -> None:
    model = made()
    expected = model(**tokens())
    chain = BlockChain(model, "blocks", guarded=False)
    assert torch.equal(model(**tokens()), expected)
    with chain.handled_by(Doubling()):
        other = model(**tokens())
    assert not torch.equal(other, expected)
    assert torch.equal(model(**tokens()), expected)


def test_a_guarded_chain_is_not_called_outside_of_a_step() -> None:
    model = made()
    BlockChain(model, "blocks", guarded=True)
    with pytest.raises(RunFailed, match="stage-forward"):
        model(**tokens())


@pytest.mark.parametrize(
    ("split", "said"),
    [("block", "blocks"), ("norm", "is a LayerNorm"), ("", "names no module")],
)
def test_what_is_no_list_of_blocks(split: str, said: str) -> None:
    with pytest.raises(ConfigError, match="module-split") as caught:
        find_blocks(made(), split)
    assert said in str(caught.value)


def test_the_same_block_in_several_places() -> None:
    block = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="same block"):
        find_blocks(nn.Sequential(nn.Sequential(block, block)), "0")


def test_the_stream_of_a_call_and_of_its_output() -> None:
    x, mask = torch.ones(2), torch.zeros(3)
    call = BlockCall(lambda hidden, mask: hidden + 1, (), {"hidden": x, "mask": mask})
    assert call.x is x
    assert [id(one) for one in call.others()] == [id(mask)]
    assert torch.equal(call.run(x * 3), torch.full((2,), 4.0))
    assert stream_of((x, None), "block") is x
    with pytest.raises(ConfigError, match="2 tensors"):
        stream_of((x, mask), "block")
    with pytest.raises(ConfigError, match="no tensor"):
        _ = BlockCall(lambda: None, (3,), {}).x
