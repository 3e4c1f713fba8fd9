"""The calls of blocks go to a handler, and are refused where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.core.errors import ConfigError, RunFailed
from echelon.parallel.module.pipeline.chain import (
    EPILOGUE,
    PROLOGUE,
    BlockCall,
    BlockChain,
    Trace,
    find_blocks,
    follow,
    leaving_no_trace,
    stream_of,
)
from tests.parallel.module.pipeline.chains import LOSS, made, tokens


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


def traced(model: Any) -> Trace:
    """Return the trace of a module."""
    chain = BlockChain(model, "blocks", guarded=True)
    return follow(model, chain, LOSS, tokens(), at=frozenset((0, 2, 4)))


def test_where_parameters_are_used_and_what_flows() -> None:
    model = made()
    expected = LOSS.sum_of(model(**tokens()), tokens())
    seen = traced(model)
    assert seen.uses["embed.weight"] == {PROLOGUE}
    assert seen.uses["blocks.1.weight"] == {"blocks.1"}
    assert seen.uses["norm.bias"] == {EPILOGUE}
    assert seen.uses["extra"] == frozenset()
    assert sorted(seen.streams) == [0, 2, 4]
    assert torch.equal(seen.streams[0], model.embed(tokens()["tokens"]))
    assert torch.equal(seen.loss, expected)


def backwards(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in reversed(model.blocks):
        x = block(x)
    return x


def early(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return model.blocks[1](model.blocks[0](x))


def between(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x) * model.extra
    return x


def narrower(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)[:, :-1]
    return x


class Pair(nn.Linear):
    """A block that gives two tensors, or takes another one."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        y = super().forward(x)
        return y if other is not None else (y, y)


def pairs(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)[0]
    return x


def looks_back(model: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    first = x
    for block in model.blocks:
        x = block(x, first)
    return x


@pytest.mark.parametrize(
    ("walk", "said"),
    [
        (backwards, "blocks.3 is called where blocks.0 is due"),
        (early, "ends before blocks.2"),
        (between, "extra is used between blocks.0 and blocks.1"),
        (narrower, "takes (2, 4, 6)"),
        (pairs, "2 tensors"),
        (looks_back, "beside its stream that has a gradient"),
    ],
)
def test_what_is_no_chain(walk: Any, said: str) -> None:
    model = made(walk)
    if walk in (pairs, looks_back):
        model.blocks = nn.ModuleList(Pair(6, 6).double() for _ in range(4))
    with pytest.raises(ConfigError, match="module-chain") as caught:
        traced(model)
    assert said in str(caught.value)


def test_nothing_is_left_of_a_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    state, before = torch.get_rng_state(), model[0].running_mean.clone()  # pyright: ignore[reportCallIssue]
    with leaving_no_trace(model):
        model(torch.randn(4, 3))
        assert not torch.equal(model[0].running_mean, before)  # pyright: ignore[reportArgumentType]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].running_mean, before)  # pyright: ignore[reportArgumentType]


class Cached(nn.Module):
    """A module that keeps what it has made for the longest input, as positions often are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.longest = 0
        self.table: torch.Tensor
        self.steps: torch.Tensor
        self.register_buffer("table", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x by place."""
        if len(x) > self.longest:
            self.longest = len(x)
            self.table = torch.arange(len(x)).float()
            self.added = True
        self.steps += 1
        return x * self.table[: len(x)] * self.scale


class Grown(nn.Module):
    """A module that makes a part, and a list, when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[int] = []
        self.is_made = False
        self.register_buffer("rows", torch.eye(3).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x by the part."""
        self.seen.append(len(x))
        if not self.is_made:
            self.is_made, self.part = True, nn.Linear(3, 3)
        return self.part(x) * self.scale


def test_parts_and_lists_that_a_trace_adds_are_gone_and_sparse_buffers_stay() -> None:
    model = Grown()
    with leaving_no_trace(model):
        model(torch.ones(2, 3))
        assert (model.is_made, model.seen) == (True, [2])
    assert (model.is_made, model.seen, list(model.children())) == (False, [], [])
    model(torch.ones(2, 3))
    assert [name for name, _ in model.named_children()] == ["part"]


def test_what_a_module_keeps_for_itself_is_as_before_a_trace() -> None:
    model = Cached()
    model(torch.ones(2))
    table, version = model.table, model.table._version
    with leaving_no_trace(model):
        model(torch.ones(5))
        assert (model.longest, int(model.steps)) == (5, 2)
    assert (model.longest, int(model.steps)) == (2, 1)
    assert model.table is table
    # It was not written: what autograd has saved of it is as it was.
    assert model.table._version == version
    assert torch.equal(model(torch.ones(5)), torch.arange(5).float())
    model.steps.fill_(torch.nan)
    version = model.steps._version
    with leaving_no_trace(model):
        pass
    assert model.steps._version == version
    fresh = Cached()
    with leaving_no_trace(fresh):
        fresh(torch.ones(5))
    assert not hasattr(fresh, "added")
