# SPDX-License-Identifier: Apache-2.0
"""The blocks of a module as a chain, and one forward followed: which parameter each block uses.

Nothing of the module is rewritten. Its forward runs as it is, on every stage; only the call of a
block goes to a handler, which runs the block, passes its input on, gives it what another stage has
sent, or ends the forward. So loops, slices and counters of the module's own stay what they are.

Every rank runs `example` through the whole module once, without gradients of the blocks. What is
seen is not believed: `build.py` runs each stage alone, and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from echelon.core.errors import ConfigError, RunFailed
from echelon.core.rulebook.module import MODULE_CHAIN, MODULE_SPLIT, STAGE_FORWARD
from echelon.core.rules import did_you_mean
from echelon.parallel.module.gradients import in_backward
from echelon.parallel.module.loss import Batch, ModuleLoss

_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_PARTS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set)

PROLOGUE, EPILOGUE = "before the blocks", "after the blocks"

_ABOUT = frozenset(
    (
        *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad", "is_leaf"),
        *("is_cuda", "is_meta", "size", "dim", "numel", "stride", "is_floating_point", "__len__"),
        *("data_ptr", "is_contiguous", "element_size", "untyped_storage", "storage_offset"),
    )
)
"""What asks about a parameter, and does not read it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one forward of the whole module was."""

    example: Batch
    """The microbatch, as the loss prepared it."""
    uses: Mapping[str, frozenset[str]]
    """The parts that use each parameter: a block's name, `PROLOGUE`, `EPILOGUE`."""
    streams: Mapping[int, torch.Tensor]
    """What went into each block, and at its number of blocks what came out of the last one."""
    random: Mapping[int, Any]
    """The states of random numbers there, and under -1 the one before everything."""
    loss: torch.Tensor
    """The sum of losses."""


def follow(
    model: nn.Module, chain: BlockChain, loss: ModuleLoss, example: Batch, *, at: frozenset[int]
) -> Trace:
    """Run the module once; keep the streams into the blocks numbered in `at`.

    ConfigError where the blocks are no chain, each called once in order.
    """
    prepared = loss.prepare(example)
    named = dict(model.named_parameters())
    tracer = _Tracer(chain, at, _Uses({id(one): name for name, one in named.items()}))
    tracer.random[-1] = random_state(next(model.parameters()).device)
    with tracer.uses, chain.handled_by(tracer):
        output = model(**loss.inputs(prepared))
        tracer.expect_end()
        total = loss.sum_of(output, prepared).detach()
    problems = tracer.problems
    between = {n: p for n, p in tracer.uses.found.items() if any(" and " in one for one in p)}
    problems += [
        f"{name} is used {next(one for one in sorted(parts) if ' and ' in one)}"
        for name, parts in between.items()
    ]
    if problems:
        raise ConfigError(
            [
                MODULE_CHAIN.problem(one, key="split", suggestions=("mesh.pp = 1",))
                for one in dict.fromkeys(problems)
            ][:8]
        )
    return Trace(
        example=prepared,
        uses={name: frozenset(parts) for name, parts in tracer.uses.found.items()},
        streams=tracer.streams,
        random=tracer.random,
        loss=total,
    )


class _Uses(TorchFunctionMode):
    """Note which parameters are read in which part of a forward."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.part = PROLOGUE
        self.found: dict[str, set[str]] = {name: set() for name in names.values()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note the parameters that a function takes, and call it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _ABOUT:
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, nn.Parameter) and id(leaf) in self._names:
                    self.found[self._names[id(leaf)]].add(self.part)
        return func(*args, **kwargs)


class _Tracer:
    """Run every block, and note what it takes and gives."""

    def __init__(self, chain: BlockChain, at: frozenset[int], uses: _Uses) -> None:
        self._chain, self._at, self.uses = chain, at, uses
        self._next = 0
        self.problems: list[str] = []
        self.streams: dict[int, torch.Tensor] = {}
        self.random: dict[int, Any] = {}
        self._kind: tuple[torch.Size, torch.dtype] | None = None

    def call(self, index: int, call: BlockCall) -> Any:
        name = self._chain.names[index]
        if index != self._next:
            due = self._chain.names[self._next] if self._next < len(self._chain) else "nothing"
            raise ConfigError(
                MODULE_CHAIN.problem(f"{name} is called where {due} is due", key="split")
            )
        self._next += 1
        x = call.x
        self._keep(index, x, name)
        if any(other.requires_grad for other in call.others()):
            self.problems.append(f"{name} takes a tensor beside its stream that has a gradient")
        self.uses.part = name
        with torch.no_grad():
            output = call.run()
        y = self._chain.learn_form(index, output)
        last = self._next == len(self._chain)
        if last:
            self._keep(self._next, y, f"what follows {name}")
        after = "" if last else self._chain.names[self._next]
        self.uses.part = EPILOGUE if last else f"between {name} and {after}"
        return output

    def expect_end(self) -> None:
        """ConfigError unless every block was called."""
        if self._next < len(self._chain):
            raise ConfigError(
                MODULE_CHAIN.problem(
                    f"the forward ends before {self._chain.names[self._next]} is called",
                    key="split",
                )
            )

    def _keep(self, index: int, x: torch.Tensor, name: str) -> None:
        kind = (x.shape, x.dtype)
        self._kind = self._kind or kind
        if kind != self._kind:
            self.problems.append(
                f"{name} takes {tuple(x.shape)} of {x.dtype}, and the first block "
                f"{tuple(self._kind[0])} of {self._kind[1]}"
            )
        if index in self._at:
            self.streams[index] = x.detach().clone()
            self.random[index] = random_state(x.device)


def random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of random numbers of the host and of a device."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def set_random_state(state: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    """Go on with the random numbers of a state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Undo what forwards inside do to buffers, to attributes of modules and to random numbers.

    A buffer that they leave as it is is not written: a graph of before may have saved it. Lists,
    dicts and sets of attributes have what they had, and modules the parts that they had; any other
    object that an attribute names is not looked into.
    """
    device = next(model.parameters()).device
    held = [(vars(one), dict(vars(one)), _contents(one)) for one in list(model.modules())]
    values = [(one, one.detach().clone(), one._version) for one in model.buffers()]
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)
        for attributes, before, contents in held:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            attributes.update(before)
            for one, had in contents:
                _refill(one, had)
        with torch.no_grad():
            for one, before, version in values:
                if one.shape != before.shape:
                    one.data = before
                elif not one.is_meta and _is_written(one, before, version):
                    one.copy_(before)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return what a module keeps things in, beside copies: its parts, and plain attributes."""
    own = [value for name, value in vars(module).items() if name not in _OF_ANY_MODULE]
    parts = [vars(module)[name] for name in _PARTS]
    return [(one, one.copy()) for one in (*parts, *own) if type(one) in _CONTAINERS]


def _refill(one: Any, had: Any) -> None:
    """Put back what a list, a dict or a set had."""
    one.clear()
    if isinstance(one, list):
        cast("list[Any]", one).extend(had)
    else:
        one.update(had)


def _is_written(one: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Return whether a buffer has other values; what is no number equals itself here."""
    if one.layout != torch.strided:
        return one._version != version
    return not bool(((one == before) | (one.isnan() & before.isnan())).all())
