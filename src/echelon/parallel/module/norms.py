"""Root-mean-square norms of a module in fewer passes over memory.

Such a norm, written with tensor operations, keeps two tensors of the size of its input and reads or
writes as many as a dozen in its backward; here its input and one number of each row are kept.

Nothing is taken for one by its name alone: a layer qualifies where its output and its gradients on
random values are those of the formula. Only float32 is computed so: of narrower inputs the layer
says where it rounds, and of float64 where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from echelon.parallel.module.pipeline.trace import leaving_no_trace

_SUFFIX = "RMSNorm"
_EPSILONS = ("variance_epsilon", "eps")
_PROBE_ROWS = 3  # rows of random values that a layer is tried on
_NEAR = 1e-5  # of the largest value
"""How far apart two ways to compute one norm may be in float32, of the largest value."""


class RootMeanSquareNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich, 2019)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normalised x; keep x and the inverse of its rms."""
        inverse = torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps = eps
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx = inverse * (dy w - x_hat mean(dy w x_hat)) and dw = sum(dy x_hat)."""
        x, weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # this backward is itself differentiated
            y = plain_norm(x, weight, ctx.eps)
            wanted = [one for one in (x, weight) if one.requires_grad]
            given = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
            return (*(next(given) if one.requires_grad else None for one in (x, weight)), None)
        x_hat = x * inverse
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy * x_hat).reshape(-1, x.shape[-1]).sum(0)
        scaled = dy * weight
        pull = torch.linalg.vecdot(scaled, x_hat).unsqueeze(-1) / x.shape[-1]
        return scaled.addcmul_(x_hat, pull, value=-1).mul_(inverse), dweight, None


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight by operations of autograd."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def shorten_norms(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Compute the norms among `modules` in fewer passes; return them."""
    found: list[nn.Module] = []
    fits: dict[tuple[type, float], bool] = {}
    for module in modules:
        eps = _epsilon(module)
        if eps is None:
            continue
        key = (type(module), eps)
        if key not in fits:
            fits[key] = _is_plain(module, eps)
        if fits[key]:
            cast("Any", module).forward = _NormForward(module, eps)
            found.append(module)
    return found


class _NormForward:
    """The forward of one norm; copies of the layer have that of their class."""

    def __init__(self, module: nn.Module, eps: float) -> None:
        self._module, self._eps = module, eps

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        module: Any = self._module
        x = args[0] if len(args) == 1 and not kwargs else None
        short = isinstance(x, torch.Tensor) and x.dtype == module.weight.dtype == torch.float32
        if not short or torch.compiler.is_compiling():
            return type(module).forward(module, *args, **kwargs)
        y: Any = RootMeanSquareNorm.apply(x, module.weight, self._eps)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., torch.Tensor]:
        return _forward_of_class(memo[id(self._module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of_class, (self._module,)


def _forward_of_class(module: nn.Module) -> Callable[..., torch.Tensor]:
    return MethodType(type(module).forward, module)


def _epsilon(module: nn.Module) -> float | None:
    """Return what a layer that may be such a norm adds to the mean square."""
    kind = type(module)
    names = [name for name, _ in module.named_parameters()]
    weight = getattr(module, "weight", None)
    if not kind.__name__.endswith(_SUFFIX) or names != ["weight"] or "forward" in vars(module):
        return None
    if kind is nn.RMSNorm or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    known = [getattr(module, name) for name in _EPSILONS if hasattr(module, name)]
    return float(known[0]) if known and isinstance(known[0], float) else None


def _is_plain(module: nn.Module, eps: float) -> bool:
    """Return whether a layer computes the formula, by what it makes of random values."""
    weight: Any = module.weight
    if weight.dtype != torch.float32 or weight.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)
    width = weight.shape[0]
    rows, push, scale = (
        torch.randn(shape, generator=generator).to(weight.device)
        for shape in ((_PROBE_ROWS, width), (_PROBE_ROWS, width), (width,))
    )

    def own(x: torch.Tensor, values: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {"weight": values}, (x,))

    results: list[tuple[torch.Tensor, ...]] = []
    with leaving_no_trace(module), torch.enable_grad():
        for run in (own, lambda x, values: plain_norm(x, values, eps)):
            x, values = rows.clone().requires_grad_(), scale.clone().requires_grad_()
            try:
                y = run(x, values)
                results.append((y.detach(), *torch.autograd.grad(y, (x, values), push)))
            except (AttributeError, RuntimeError, TypeError, ValueError):
                return False  # it takes or gives something else
    return all(
        bool((mine - theirs).abs().max() <= _NEAR * theirs.abs().max())
        for mine, theirs in zip(*results, strict=True)
    )
