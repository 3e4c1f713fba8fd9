# SPDX-License-Identifier: Apache-2.0
"""How tensor ranks split a module: the rules, from its user or from one forward pass; the layers.

A guess follows the linear layers as they run. A tensor remembers the linear layers whose outputs
reached it through no other one. Where all that such layers give goes to one linear layer, and
nothing else comes to that, they are its columns and it is the row: q, k and v and the output of
attention; gate, up and down. Outputs are gathered for a computation over the whole width between
them, such as a norm. A guess is to be proven.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_TENSOR_GUESS
from echelon.layout.modules import UNSPLIT
from echelon.parallel.module.tensor.layers import TensorLink, cut_parameters, replace_layers
from echelon.parallel.module.tensor.ranks import watch_first_batch, watch_first_stream
from echelon.parallel.module.tensor.rules import (
    NamedTargets,
    RuleWord,
    find_targets,
    read_rules,
    rules_of,
)
from echelon.parallel.module.tensor.split import SplitPlan, is_linear, is_transposed, plan_split
from echelon.parallel.transport.collectives import Group

AUTO, GUESS = "auto", "guess"

Rules = Mapping[str, RuleWord]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChoice:
    """Hold what a user says of tensor ranks: rules, or where they come from.

    `example` are the arguments of a forward that shows which layer feeds which.
    """

    rules: Rules | Literal["auto", "guess"] = AUTO
    example: Sequence[Any] = ()
    accepts_guess: bool = False


NO_RULES = TensorChoice()
"""What a class says of itself."""

_WHOLE = SplitPlan(
    split=UNSPLIT, layers=(), named=NamedTargets(targets=(), divisions=()), regions=frozenset()
)


def choose_split(
    plan: Plan, model: nn.Module, choice: TensorChoice, blocks: Sequence[str]
) -> SplitPlan:
    """Return how the tensor ranks of a plan split a module; ConfigError where they cannot."""
    degree, rules = plan.mesh.tp, choice.rules
    if isinstance(rules, str) and degree == 1:
        return _WHOLE
    if rules == GUESS:
        rules = guess_rules(model, choice.example)
        if not choice.accepts_guess:
            raise ConfigError(
                MODULE_TENSOR_GUESS.problem(
                    f"rules were guessed from one forward, and nobody has proven them: {rules}",
                    key="tensor",
                    suggestions=("echelon prove --module FILE:FACTORY", "guess='accept'"),
                )
            )
    elif isinstance(rules, str):
        rules = rules_of(model)
    named = find_targets(model, read_rules(rules))
    sequence = blocks if degree > 1 and plan.layout.sequence_parallel else None
    found = plan_split(model, named, degree=degree, blocks=sequence)
    return found if degree > 1 else _WHOLE


def apply_split(
    model: nn.Module, plan: SplitPlan, named: Mapping[str, nn.Parameter], group: Group
) -> TensorLink:
    """Cut the parameters of a module, and have its layers work on what is left.

    Return what moves values between tensor ranks.
    """
    if group.size == 1:
        return TensorLink(group)
    cut_parameters(plan, named, group)
    link = replace_layers(model, plan, group)
    watch_first_batch(model, group)
    for head in link.heads:
        watch_first_stream(head.module, link)
    return link


_OVER_WIDTH = frozenset(
    [
        "softmax",
        "log_softmax",
        "mean",
        "sum",
        "norm",
        "layer_norm",
        "rms_norm",
        "var",
        "std",
        "amax",
        "max",
        "logsumexp",
    ]
)
"""Functions that put all columns of a tensor together."""

_CUTS = ("chunk", "split", "tensor_split", "__getitem__")

_HEADS = re.compile(r"(n|num)?_?(q|kv|key_value|attention)?_?heads?")

Sources = frozenset[str]


class _Trace(TorchFunctionMode):
    """Watch a forward: whose outputs each tensor is made of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.widths = {name: _outputs(one) for name, one in model.named_modules() if is_linear(one)}
        self.names = {id(one): name for name, one in model.named_parameters()}
        self.inputs: dict[str, Sources] = {}
        self.calls: dict[str, int] = {}
        self.parts: dict[str, dict[int, int]] = {}
        self.spanned: set[str] = set()
        self.used: dict[str, Sources] = {}
        self._sources: dict[int, Sources] = {}
        self._alive: list[object] = []

    def entered(self, name: str, x: torch.Tensor) -> None:
        """Learn what a linear layer is given."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.inputs[name] = self.inputs.get(name, frozenset()) | self.sources(x)

    def left(self, name: str, y: torch.Tensor) -> None:
        """Learn what a layer gives."""
        self._note(y, frozenset((name,)))

    def sources(self, x: torch.Tensor) -> Sources:
        """Return the layers that a tensor is made of."""
        return self._sources.get(id(x), frozenset())

    def _note(self, x: torch.Tensor, sources: Sources) -> None:
        self._alive.append(x)
        self._sources[id(x)] = sources

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and note whose outputs its result is made of."""
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)]
        sources = frozenset[str]().union(*(self.sources(one) for one in given))
        if sources:
            name = getattr(func, "__name__", "")
            for one in given:
                parameter = self.names.get(id(one))
                if parameter is not None and parameter.rpartition(".")[0] in self.widths:
                    continue  # a linear layer's own
                if parameter is not None:
                    self.used[parameter] = self.used.get(parameter, frozenset()) | sources
                    self._look_over(sources, one.numel())
                elif name in _OVER_WIDTH and one.dim():
                    self._look_over(self.sources(one), one.shape[-1])
            if name in _CUTS:
                self._look_at_parts(args[0], result)
            if name == "__setitem__":
                self._note(args[0], sources)
        for one in tree_leaves(result):
            if torch.is_tensor(one) and id(one) not in self.names:
                self._note(one, sources)
        return result

    def _look_over(self, sources: Sources, size: int) -> None:
        self.spanned |= {name for name in sources if self.widths.get(name) == size}

    def _look_at_parts(self, x: torch.Tensor, result: Any) -> None:
        sources = self.sources(x)
        if len(sources) != 1 or not x.dim():
            return
        (name,) = sources
        if self.widths.get(name) != x.shape[-1]:
            return
        for one in tree_leaves(result):
            if torch.is_tensor(one) and one.dim() == x.dim() and one.shape[-1] < x.shape[-1]:
                start = int(one.storage_offset() - x.storage_offset()) % x.shape[-1]
                self.parts.setdefault(name, {})[start] = one.shape[-1]


def guess_rules(model: nn.Module, example: Sequence[Any]) -> dict[str, RuleWord]:
    """Return rules from a forward of `example`, whose values and random numbers leave no trace.

    Arguments by name stand in a mapping at the end. ConfigError where there is no pair of layers.
    """
    args, kwargs = _arguments(model, example)
    trace = _Trace(model)
    modules = dict(model.named_modules())
    handles = [handle for name in trace.widths for handle in _watched(trace, name, modules[name])]
    handles += [
        one.register_forward_hook(_leaver(trace, name))
        for name, one in modules.items()
        if isinstance(one, nn.Embedding)
    ]
    training = [one for one in modules.values() if one.training]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(), trace:
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for one in training:
            one.training = True
    rules = _general(modules, dict(_found(trace, model)))
    if not any(word in ("row", "row-scattered") for word in rules.values()):
        raise ConfigError(
            MODULE_TENSOR_GUESS.problem(
                "no linear layer gives all its outputs to one other linear layer",
                key="tensor",
                suggestions=("tensor={'NAME': 'column', ...}",),
            )
        )
    return rules


def _arguments(model: nn.Module, example: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    if not example:
        dummy: Any = getattr(model, "dummy_inputs", None)
        if not isinstance(dummy, dict):
            raise ConfigError(
                MODULE_TENSOR_GUESS.problem(
                    "rules are guessed from a forward, and there is nothing to give to it",
                    key="example",
                    suggestions=("example=(batch,)",),
                )
            )
        return (), {**dummy}
    if isinstance(example[-1], Mapping):
        return example[:-1], dict(example[-1])
    return example, {}


def _watched(trace: _Trace, name: str, module: nn.Module) -> Iterator[Any]:
    def before(module: nn.Module, args: Any) -> None:
        trace.entered(name, args[0])

    yield module.register_forward_pre_hook(before)
    yield module.register_forward_hook(_leaver(trace, name))


def _leaver(trace: _Trace, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def after(module: nn.Module, args: Any, output: Any) -> None:
        trace.left(name, output)

    return after


def _found(trace: _Trace, model: nn.Module) -> Iterator[tuple[str, RuleWord]]:
    readers: dict[str, set[str]] = {}
    for reader, sources in trace.inputs.items():
        for name in sources:
            readers.setdefault(name, set()).add(reader)
    cut: dict[str, str] = {}
    for row, sources in trace.inputs.items():
        once = all(trace.calls.get(name) == 1 for name in (*sources, row))
        alone = bool(sources) and all(readers[name] == {row} for name in sources)
        if not (once and alone) or cut.keys() & {row, *sources}:
            continue
        gathers = bool(trace.spanned & sources)
        for name in sources:
            cut[name] = "column-gathered" if gathers else "column"
            yield name, _with_parts(trace, name, cut[name])
        cut[row] = "row-scattered" if gathers else "row"
        yield row, cut[row]
    columns = {name for name, word in cut.items() if word == "column"}
    for name, sources in trace.used.items():
        if sources <= columns:
            yield name, "summed"
    yield from _divided(model, columns)
    yield from _vocabulary(trace, model, readers, cut)


def _with_parts(trace: _Trace, name: str, word: str) -> RuleWord:
    starts = sorted(trace.parts.get(name, {}).items())
    sizes = tuple(size for _, size in starts)
    together = (
        all(start == sum(sizes[:index]) for index, (start, _) in enumerate(starts))
        and sum(sizes) == trace.widths[name]
    )
    return (word, sizes) if len(sizes) > 1 and together else word


def _divided(model: nn.Module, columns: set[str]) -> Iterator[tuple[str, RuleWord]]:
    """Yield the heads that a module of one's own keeps beside its columns."""
    for parent in sorted({name.rpartition(".")[0] for name in columns}):
        for key, value in vars(model.get_submodule(parent)).items():
            if isinstance(value, int) and not isinstance(value, bool) and _HEADS.fullmatch(key):
                yield f"{parent}.{key}".removeprefix("."), "divide"


def _vocabulary(
    trace: _Trace, model: nn.Module, readers: Mapping[str, object], cut: Mapping[str, str]
) -> Iterator[tuple[str, RuleWord]]:
    """Yield the largest embedding, and a last linear layer of as many outputs."""
    tables = [(n, one) for n, one in model.named_modules() if isinstance(one, nn.Embedding)]
    if not tables:
        return
    name, table = max(tables, key=lambda one: one[1].num_embeddings)
    yield name, "vocabulary"
    for head, width in trace.widths.items():
        last = head in trace.inputs and head not in readers and head not in cut
        if last and width == table.num_embeddings:
            yield head, "vocabulary"


def _outputs(module: nn.Module) -> int:
    one: Any = module
    return one.nf if is_transposed(module) else one.out_features


def _general(
    modules: Mapping[str, nn.Module], rules: Mapping[str, RuleWord]
) -> dict[str, RuleWord]:
    """Return rules with `*` for numbers, where all that it names has the same."""
    found: dict[str, RuleWord] = {}
    groups: dict[str, list[str]] = {}
    for name in rules:
        groups.setdefault(_star(name), []).append(name)
    everything = [*modules, *rules]
    for pattern, names in groups.items():
        same = len({rules[name] for name in names}) == 1
        alike = {name for name in everything if _star(name) == pattern}
        if same and alike == set(names):
            found[pattern] = rules[names[0]]
        else:
            found |= {name: rules[name] for name in names}
    return found


def _star(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
