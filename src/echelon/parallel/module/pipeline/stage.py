# SPDX-License-Identifier: Apache-2.0
"""One stage of a module: its own forward, entered at one block and left at another.

Split: the blocks; the first stage also has what comes before them, the last one what comes after.
Sent:  as in `parallel/pipeline.py`: the stream on, its gradient back, per microbatch.
Bytes: `module_pipeline_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: nothing; stages may be uneven, or empty.
Source: Huang et al., "GPipe", 2019.

Every stage runs the forward from its beginning, for what its blocks take beside the stream: masks,
position embeddings. Parameters of other stages read as NaN there and take no memory, blocks of
earlier stages pass their input on, and the first own block gets what was sent in its place. At the
first block that is not its own, a stage ends the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import MODULE_CHAIN
from echelon.parallel.module.loss import Batch, ModuleLoss
from echelon.parallel.module.pipeline.chain import BlockCall, BlockChain, leaving_no_trace
from echelon.parallel.module.tensor.layers import TensorLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Say which blocks a stage has: those from `start` up to `stop`."""

    stage: int
    start: int
    stop: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMicrobatch:
    """Hold one microbatch of this rank, and its number."""

    index: int
    batch: Batch


class StageEnds(Exception):
    """End a forward with the stream that goes to the next stage."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.x = x


class StageHandler:
    """Handle the calls of blocks in one forward of one stage."""

    def __init__(
        self,
        chain: BlockChain,
        window: Window,
        received: torch.Tensor | None,
        on_enter: Callable[[], None] = lambda: None,
    ) -> None:
        """Give `received` to the first own block; tell `on_enter` before."""
        self._chain, self._window, self._received = chain, window, received
        self._on_enter = on_enter
        self._next = 0

    def call(self, index: int, call: BlockCall) -> Any:
        """Run an own block, pass on the stream of an earlier one, end at a later one."""
        chain, window = self._chain, self._window
        if index != self._next:
            due = chain.names[self._next] if self._next < len(chain) else "no block"
            raise _broken(f"{chain.names[index]} is called where {due} is due")
        self._next += 1
        if index < window.start:
            # After all blocks, a last stage without any takes what was sent.
            entered = window.start == len(chain) and index == window.start - 1
            return chain.in_form(index, self._sent() if entered else call.x)
        if index >= window.stop:
            raise StageEnds(call.x)
        output = self.run_own(index, call)
        if index == len(chain) - 1 and not window.last:
            raise StageEnds(chain.learn_form(index, output))
        return output

    def run_own(self, index: int, call: BlockCall) -> Any:
        """Run an own block, the first one with what was sent; in a backward (checkpointing) too."""
        entered = index == self._window.start and not self._window.first
        return call.run(self._sent() if entered else None)

    def expect_end(self) -> None:
        """RunFailed unless every own block was called."""
        if self._next < self._window.stop:
            name = self._chain.names[self._next]
            raise _broken(f"the forward ended before {name} was called")

    def _sent(self) -> torch.Tensor:
        assert self._received is not None, "only the first stage gets nothing"
        self._on_enter()
        return self._received


class _Recompute:
    """Run own blocks that a backward calls again."""

    def __init__(self, handler: StageHandler) -> None:
        self._handler = handler

    def call(self, index: int, call: BlockCall) -> Any:
        return self._handler.run_own(index, call)


class ModuleStage:
    """Compute one stage of a module, as `PipelineExecutor` asks for it."""

    def __init__(
        self, model: nn.Module, chain: BlockChain, loss: ModuleLoss, window: Window
    ) -> None:
        self._model, self._chain, self.loss, self.window = model, chain, loss, window
        self.first, self.last = window.first, window.last
        self.attention: Callable[[Window], AbstractContextManager[None]] = lambda _: nullcontext()
        self.on_enter: Callable[[], None] = lambda: None
        self.link: TensorLink | None = None
        self._recompute: dict[int, _Recompute] = {}

    def __call__(
        self, x: torch.Tensor | None, batch: ModuleMicrobatch, *, scale: float = 1.0
    ) -> torch.Tensor:
        """Return the stream for the next stage or, on the last one, scale x the sum of losses."""
        if self.window.start == self.window.stop and not (self.first or self.last):
            assert x is not None, "only the first stage gets nothing"
            return x
        handler = StageHandler(self._chain, self.window, x, self._entered)
        if self.link is not None:
            self.link.sends = self.first
        if torch.is_grad_enabled():
            self._recompute[batch.index] = _Recompute(handler)
        try:
            with (
                self._chain.handled_by(handler),
                self.attention(self.window),
                self.loss.around(),
            ):
                output = self._model(**self.loss.inputs(batch.batch))
        except StageEnds as ended:
            out = ended.x
            if not torch.is_grad_enabled() or out.requires_grad:
                return out
            # Nothing of this stage is trained: its gradient goes nowhere.
            return out.detach().requires_grad_()
        handler.expect_end()
        if not self.last:
            raise _broken(f"the forward did not come to {self._chain.names[self.window.stop]}")
        return self.loss.sum_of(output, batch.batch) * scale

    def _entered(self) -> None:
        self.on_enter()
        if self.link is not None:
            self.link.sends = True

    def begin_backward(self, microbatch: int) -> None:
        """Let the backward of a microbatch run blocks again, for checkpointing."""
        self._chain.recomputed_by(self._recompute.pop(microbatch, None))

    def end_backward(self) -> None:
        """Learn that this backward is over."""
        self._chain.recomputed_by(None)


class ModuleStream:
    """Know the shape of the stream of each microbatch, from the module's own prologue."""

    def __init__(
        self, model: nn.Module, chain: BlockChain, loss: ModuleLoss, link: TensorLink | None = None
    ) -> None:
        """Ask the module once for each kind of microbatch."""
        self._model, self._chain, self._loss, self._link = model, chain, loss, link
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def buffer(self, batch: ModuleMicrobatch) -> torch.Tensor:
        """Return memory for the stream of a microbatch, or for its gradient."""
        return torch.empty_like(self.like(batch))

    def like(self, batch: ModuleMicrobatch) -> torch.Tensor:
        """Return a tensor without memory that is as the stream of a microbatch."""
        key = tuple(
            (name, tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else (name,)
            for name, one in batch.batch.items()
        )
        if key not in self._known:
            x = self._stream_of(batch)
            self._known[key] = x.new_empty(()).expand(x.shape)
        return self._known[key]

    def _stream_of(self, batch: ModuleMicrobatch) -> torch.Tensor:
        """Return what the first block would take, and leave nothing else of the forward to it."""
        window = Window(stage=0, start=0, stop=0, first=True, last=False)
        handler = StageHandler(self._chain, window, None)
        if self._link is not None:
            self._link.sends = False
        try:
            with (
                leaving_no_trace(self._model),
                self._chain.handled_by(handler),
                torch.no_grad(),
            ):
                self._model(**self._loss.inputs(batch.batch))
        except StageEnds as ended:
            return ended.x
        finally:
            if self._link is not None:
                self._link.sends = True
        raise _broken(f"the forward did not come to {self._chain.names[0]}")


def hide(
    parameters: Mapping[str, nn.Parameter], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Let parameters read as NaN, without memory, of `dtype` or theirs; return what they were."""
    kept = {name: one.data for name, one in parameters.items()}
    for one in parameters.values():
        nothing = one.data.new_zeros((), dtype=dtype)
        if one.is_floating_point():
            nothing.fill_(float("nan"))
        one.data = nothing.expand(one.shape)
    return kept


def show(parameters: Mapping[str, nn.Parameter], kept: Mapping[str, torch.Tensor]) -> None:
    """Give parameters back what `hide` returned."""
    for name, one in parameters.items():
        one.data = kept[name]


def _broken(why: str) -> RunFailed:
    return RunFailed(MODULE_CHAIN.problem(f"{why}, which was not so in the example"))
