# SPDX-License-Identifier: Apache-2.0
"""The training on one device: what every tensor must be, in float64, and how rough a precision is.

The run's own precision is drawn several times, with losses that are 2^(i/8) times as large, as in
`proof/claims/tolerance.py`: the same gradients, rounded otherwise.

Many modules compute a norm or a softmax in float32 whatever their dtype is. In a float64 proof that
rounds, and hides errors below 1e-8. With `StayWide` a conversion of float64 to float32 is none, and
grouped products, which PyTorch has for narrower numbers only, are made one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_RETURNED
from echelon.launch.context import RankContext
from echelon.proof.claims.tolerance import FACTORS
from echelon.proof.evidence.captured import LogicalParameters, Reference, ReferencePass
from echelon.proof.evidence.run import Passed, ReferenceStep, Tensors
from echelon.proof.verify.case import OneDevice
from echelon.proof.verify.subject_file import SubjectFile, SubjectSettings, open_subject
from echelon.proof.verify.watch import PassingWatch

CLIP_EPSILON = 1e-6  # as torch, DeepSpeed and Megatron add to the norm they divide by


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeviceAnswer:
    """Hold what the file says, and what one device did for each pass."""

    settings: SubjectSettings
    passes: tuple[ReferencePass, ...]


def run_one_device(context: RankContext, argument: Mapping[str, Any]) -> OneDeviceAnswer:
    """Run the file's `one_device` in each precision: the target of a single rank.

    `argument` holds `file` and `ranks` (None where the file's mesh says).
    """
    file = open_subject(argument)
    settings = file.settings(argument["ranks"])
    return OneDeviceAnswer(settings=settings, passes=_passes(file, settings, context.device))


def _passes(
    file: SubjectFile, settings: SubjectSettings, device: torch.device
) -> tuple[ReferencePass, ...]:
    passes: list[ReferencePass] = []
    exact: Reference | None = None
    for dtype in settings.precisions:
        if dtype == "float64":
            exact = _run(file, settings, device, "float64")
            passes.append(ReferencePass(dtype=dtype, exact=exact))
            continue
        rough = tuple(_run(file, settings, device, dtype, factor=one) for one in FACTORS)
        first = rough[0].initial
        # Both begin from the same numbers: those that the run's own precision can hold.
        same = exact is not None and all(
            torch.equal(value.double(), exact.initial[name]) for name, value in first.items()
        )
        if exact is None or not same:
            exact = _run(file, settings, device, "float64", initial=first)
        passes.append(ReferencePass(dtype=dtype, exact=exact, rough=rough))
    return tuple(passes)


def _run(
    file: SubjectFile,
    settings: SubjectSettings,
    device: torch.device,
    dtype: str,
    *,
    factor: float = 1.0,
    initial: Tensors | None = None,
) -> Reference:
    made = file.one_device(settings.case(0, dtype, device))
    logical = logical_parameters(made.model)
    names = dict(made.model.named_parameters())
    if initial is not None:
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(initial[name])
    start = _copies(names)
    steps: list[ReferenceStep] = []
    modules = [(name, module) for name, module in made.model.named_modules() if name]
    watch = PassingWatch(modules, lambda: len(steps)) if dtype == "float64" else None
    for number in range(settings.num_steps):
        with file.calling(f"one_device, step {number}"):
            steps.append(_step(made, names, number, factor, watch))
    passed = Passed() if watch is None else watch.passed
    return Reference(logical=logical, initial=start, steps=tuple(steps), passed=passed)


def logical_parameters(model: nn.Module) -> LogicalParameters:
    """Return the parameters of one device, with all names that tied ones have."""
    names = dict(model.named_parameters())
    first = {id(parameter): name for name, parameter in names.items()}
    every = model.named_parameters(remove_duplicate=False)
    return LogicalParameters(
        shapes={name: tuple(parameter.shape) for name, parameter in names.items()},
        aliases={name: first[id(p)] for name, p in every if first[id(p)] != name},
        frozen=frozenset(name for name, p in names.items() if not p.requires_grad),
    )


def _step(
    made: OneDevice,
    names: Mapping[str, nn.Parameter],
    number: int,
    factor: float,
    watch: PassingWatch | None,
) -> ReferenceStep:
    told = _parts(made, names, number) if made.parts is not None and factor == 1.0 else []
    made.optimizer.zero_grad(set_to_none=True)
    with nullcontext() if watch is None else watch.hooks():
        loss = made.loss(number)
        if not torch.is_tensor(loss) or loss.numel() != 1:
            problem = "one_device: loss must return a tensor of one number"
            raise ConfigError(VERIFY_RETURNED.problem(problem))
        addends = [] if watch is None else _addends(loss.grad_fn)
        (loss * factor).backward(retain_graph=len(addends) > 1)
    gradients = _gradients(names, factor)
    terms = tuple(_of_term(loss, addend, addends, names) for addend in addends)
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in gradients.values()))
    scale = 1.0
    if made.clip_norm is not None:
        scale = min(1.0, made.clip_norm / (norm + CLIP_EPSILON))
    for name, parameter in names.items():
        if parameter.grad is not None:
            parameter.grad = gradients[name] * scale
    before = _copies(names)
    rates = {
        name: (float(group.get("lr", 0.0)), float(group.get("weight_decay", 0.0)))
        for group in made.optimizer.param_groups
        for name, parameter in names.items()
        if any(parameter is one for one in group["params"])
    }
    made.optimizer.step()
    if made.scheduler is not None:
        made.scheduler.step()
    return ReferenceStep(
        step=number,
        loss=float(loss.detach()),
        grad_norm=norm,
        clip_norm=made.clip_norm,
        clip_scale=scale,
        gradients=gradients,
        before=before,
        after=_copies(names),
        state=_state(made.optimizer, names),
        rates=rates,
        parts=tuple((tokens, gradients) for tokens, _, gradients in told),
        part_losses=tuple((tokens, total) for tokens, total, _ in told),
        terms=terms,
    )


_MOST_TERMS = 16
"""Terms of a loss whose gradients are kept."""


def _addends(node: Any) -> list[Any]:
    """Return the nodes of autograd that a loss adds up, times numbers; none if it is no sum."""
    terms = _terms_of(node)
    return terms if 1 < len(terms) <= _MOST_TERMS and len({*terms}) == len(terms) else []


def _terms_of(node: Any) -> list[Any]:
    inputs = [function for function, _ in node.next_functions if function is not None]
    kind = type(node).__name__.removesuffix("0")
    if kind in ("AddBackward", "SubBackward", "StackBackward") and len(inputs) > 1:
        return [term for function in inputs for term in _terms_of(function)]
    if kind in _ONE_TERM and len(inputs) == 1 and inputs[0].next_functions:
        inner = _terms_of(inputs[0])
        return inner if len(inner) > 1 else [node]
    return [node]


_ONE_TERM = ("AddBackward", "SubBackward", "MulBackward", "DivBackward", "SumBackward")
"""Nodes whose input may be a sum: they multiply it, or add a number without gradient."""


def _of_term(
    loss: torch.Tensor, term: Any, terms: Sequence[Any], names: Mapping[str, nn.Parameter]
) -> Tensors:
    """Return the gradient of a term: the gradients of all other terms are set to 0."""
    handles = [
        other.register_prehook(lambda given: tuple(g * 0 for g in given))
        for other in terms
        if other is not term
    ]
    trained = {name: p for name, p in names.items() if p.requires_grad}
    given = torch.autograd.grad(
        loss, list(trained.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    for handle in handles:
        handle.remove()
    return {name: grad.detach().cpu() for name, grad in zip(trained, given, strict=True)}


def _parts(
    made: OneDevice, names: Mapping[str, nn.Parameter], number: int
) -> list[tuple[int, float, Tensors]]:
    assert made.parts is not None, "asked for only where there are parts"
    found: list[tuple[int, float, Tensors]] = []
    for total, tokens in made.parts(number):
        made.optimizer.zero_grad(set_to_none=True)
        total.backward()
        found.append((int(tokens), float(total.detach()), _gradients(names, 1.0)))
    return found


def _gradients(names: Mapping[str, nn.Parameter], factor: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() / factor
        for name, p in names.items()
        if p.requires_grad
    }


def _copies(names: Mapping[str, nn.Parameter]) -> Tensors:
    return {name: parameter.detach().cpu().clone() for name, parameter in names.items()}


def _state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value) and value.shape == parameter.shape and value.dim():
                found.setdefault(key, {})[name] = value.detach().cpu().clone()
    return found


_GROUPED = ("grouped_mm", "_grouped_mm")


class StayWide(TorchFunctionMode):
    """Leave float64 tensors as wide as they are, inside of a `with`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; where it would narrow float64 to float32, float64 stays."""
        named = dict(kwargs or {})
        x = args[0] if args else None
        if torch.is_tensor(x) and x.dtype is torch.float64:
            if func is torch.Tensor.float:
                return x
            if getattr(func, "__name__", "") in _GROUPED:
                return _products(x, *args[1:], **named)
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        return func(*args, **named)


def _products(
    rows_SI: torch.Tensor, weights_EIO: torch.Tensor, offs: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Return the product of each group of rows with its weight; `offs` are where groups end."""
    ends: list[int] = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [
        rows_SI[start:end] @ weight
        for start, end, weight in zip(starts, ends, weights_EIO, strict=True)
    ]
    rest = rows_SI.new_zeros((len(rows_SI) - ends[-1], weights_EIO.shape[-1]))
    return torch.cat([*parts, rest])
