# SPDX-License-Identifier: Apache-2.0
"""The blocks of a module as a chain: its own forward, with a hand on the call of each block.

Nothing of the module is rewritten. Its forward runs as it is, on every stage; only the call of a
block goes to a handler, which runs the block, passes its input on, gives it what another stage has
sent, or ends the forward. So loops, slices and counters of the module's own stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from echelon.core.errors import ConfigError, RunFailed
from echelon.core.rulebook.module import MODULE_CHAIN, MODULE_SPLIT, STAGE_FORWARD
from echelon.core.rules import did_you_mean
from echelon.parallel.module.gradients import in_backward


class BlockHandler(Protocol):
    """Whoever is asked when a block is called."""

    def call(self, index: int, call: BlockCall) -> Any:
        """Return what block `index` gives; `call` is what it was called with."""
        ...


class BlockCall:
    """One call of a block: its stream, what else it takes, and how to run it."""

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Take a call; the stream is its first positional argument, or its first tensor."""
        self._run, self._args, self._kwargs = run, args, dict(kwargs)
        tensors = (key for key, one in kwargs.items() if isinstance(one, torch.Tensor))
        self._place: int | str | None = 0 if args else next(tensors, None)

    @property
    def x(self) -> torch.Tensor:
        """Return the stream; ConfigError where there is no tensor."""
        found = None
        if isinstance(self._place, int):
            found = self._args[self._place]
        elif self._place is not None:
            found = self._kwargs[self._place]
        if not isinstance(found, torch.Tensor):
            raise ConfigError(
                MODULE_CHAIN.problem(f"a block is called with {type(found).__name__} and no tensor")
            )
        return found

    def others(self) -> list[torch.Tensor]:
        """Return the other tensors that the block takes."""
        leaves = tree_flatten((self._args, self._kwargs))[0]
        return [one for one in leaves if isinstance(one, torch.Tensor) and one is not self.x]

    def run(self, x: torch.Tensor | None = None) -> Any:
        """Run the block, with another stream where one is given."""
        args, kwargs = self._args, self._kwargs
        if x is not None and isinstance(self._place, int):
            args = (x, *args[1:])
        elif x is not None and self._place is not None:
            kwargs = {**kwargs, self._place: x}
        return self._run(*args, **kwargs)


def stream_of(output: Any, name: str) -> torch.Tensor:
    """Return the one tensor of what a block gives; ConfigError where there is not just one."""
    if isinstance(output, torch.Tensor):
        return output
    tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
    if isinstance(output, tuple) and len(tensors) == 1 and output[0] is tensors[0]:
        return tensors[0]
    raise ConfigError(
        MODULE_CHAIN.problem(
            f"{name} gives {type(output).__name__} with {len(tensors)} tensors, and one travels",
            suggestions=("a block that returns one tensor", "mesh.pp = 1"),
        )
    )


class BlockChain:
    """The blocks that `split` names, whose calls go to a handler while there is one."""

    def __init__(self, model: nn.Module, split: str, *, guarded: bool) -> None:
        """Take over the calls of blocks; where `guarded`, they are refused without a handler."""
        self.blocks = find_blocks(model, split)
        self.names = list(self.blocks)
        self._handler: BlockHandler | None = None
        self._recompute: BlockHandler | None = None
        self._guarded = guarded
        # Empty where a class says how one block differs from the next.
        self._forms: dict[int, Callable[[torch.Tensor], Any]] = {}
        for index, block in enumerate(self.blocks.values()):
            setattr(block, "forward", partial(self._called, index, block.forward))  # noqa: B010

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.names)

    @contextmanager
    def handled_by(self, handler: BlockHandler) -> Iterator[None]:
        """Give the calls of blocks to `handler`."""
        before, self._handler = self._handler, handler
        try:
            yield
        finally:
            self._handler = before

    def recomputed_by(self, handler: BlockHandler | None) -> None:
        """Give the calls that a backward makes (checkpointing) to `handler` from now on."""
        self._recompute = handler

    def learn_form(self, index: int, output: Any) -> torch.Tensor:
        """Return the stream of what a block gives, and remember in what form it came."""
        x = stream_of(output, self.names[index])
        rest: tuple[Any, ...] = () if output is x else output[1:]
        self._forms[index] = (lambda y: y) if output is x else (lambda y: (y, *rest))
        return x

    def in_form(self, index: int, x: torch.Tensor) -> Any:
        """Return a stream in the form in which block `index` gives it."""
        return self._forms[index](x)

    def _called(self, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        handler = self._recompute if in_backward() else self._handler
        if handler is not None:
            return handler.call(index, BlockCall(run, args, kwargs))
        if self._guarded and not in_backward():
            raise RunFailed(
                STAGE_FORWARD.problem(
                    f"{self.names[index]} was called outside of a step",
                    suggestions=("optimizer.backward(batch)", "optimizer.evaluate(batch)"),
                )
            )
        return run(*args, **kwargs)


def find_blocks(model: nn.Module, split: str) -> dict[str, nn.Module]:
    """Return the blocks that `split` names, by name; ConfigError where it names none."""
    known = dict(model.named_modules())
    lists = [name for name, one in known.items() if isinstance(one, (nn.ModuleList, nn.Sequential))]
    found = known.get(split) if split else None
    if not isinstance(found, (nn.ModuleList, nn.Sequential)):
        what = "names no module" if found is None else f"is a {type(found).__name__}"
        near = [one for one in lists if one.split(".")[-1] == split.rsplit(".", maxsplit=1)[-1]]
        raise ConfigError(
            MODULE_SPLIT.problem(
                f"split = {split!r} {what}, and a list of blocks is needed",
                key="split",
                suggestions=near or did_you_mean(split, lists) or lists,
            )
        )
    blocks = {f"{split}.{name}": block for name, block in found.named_children()}
    if len(blocks) < len(found):
        raise ConfigError(
            MODULE_SPLIT.problem(f"{split} has the same block in several places", key="split")
        )
    return blocks
