# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms of a module in fewer passes over memory.

Such a norm, written with tensor operations, keeps two tensors of the size of its input and reads or
writes as many as a dozen in its backward; here its input and one number of each row are kept.

Nothing is taken for one by its name alone: a layer qualifies where its output and its gradients on
random values are those of the formula. Only float32 is computed so: of narrower inputs the layer
says where it rounds, and of float64 where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from echelon.parallel.module.forwards.own_forward import OwnForward, is_autocast, is_plain_call
from echelon.parallel.module.pipeline.chain import leaving_no_trace

_SUFFIX = "RMSNorm"
_EPSILONS = ("variance_epsilon", "eps")
_NEAR = 1e-5
"""How far apart two ways to compute one norm may be in float32, of the largest value of a row."""

_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.Size))
"""Types of attributes that are told apart by what they print."""


class RootMeanSquareNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich, 2019)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normalised x; keep x and the inverse of its rms."""
        inverse = torch.rsqrt(_mean_of_products(x, x) + eps)
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
        pull = _mean_of_products(scaled, x_hat)
        return scaled.addcmul_(x_hat, pull, value=-1).mul_(inverse), dweight, None


def _mean_of_products(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return mean(x * other) over the last dim, [..., 1]."""
    if is_autocast(x):  # around the backward; it would round to bf16
        return (x * other).mean(-1, keepdim=True)
    return torch.linalg.vecdot(x, other).unsqueeze(-1) / x.shape[-1]


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight by operations of autograd."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def shorten_norms(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Compute the norms among `modules` in fewer passes; return them."""
    found: list[nn.Module] = []
    verdicts: dict[Hashable, bool] = {}
    for module in modules:
        name = _epsilon(module)
        if name is None:
            continue
        eps = getattr(module, name)
        said = _all_that_it_says(module)
        fits = verdicts.get(said)
        if fits is None:
            fits = verdicts[said] = _is_plain(module, eps)
        if fits:
            cast("Any", module).forward = _NormForward(module, name)
            found.append(module)
    return found


class _NormForward(OwnForward):
    """The forward of one norm."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self._name, self._eps = name, getattr(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and not kwargs and is_plain_call(args[0]):
            module = self.module
            x, weight = args[0], module.weight
            tried = getattr(module, self._name) == self._eps
            if tried and x.dtype == weight.dtype == torch.float32:
                y: Any = RootMeanSquareNorm.apply(x, weight, self._eps)
                return y
        return self.of_class(*args, **kwargs)


def _epsilon(module: nn.Module) -> str | None:
    """Return the name of what a layer that may be such a norm adds to the mean square."""
    kind = type(module)
    names = [name for name, _ in module.named_parameters()]
    weight = getattr(module, "weight", None)
    if not kind.__name__.endswith(_SUFFIX) or names != ["weight"] or "forward" in vars(module):
        return None
    if next(module.children(), None) is not None or module._buffers:
        return None  # hooks of the one would be called when it is tried, the other may be written
    if kind is nn.RMSNorm or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    name = next((one for one in _EPSILONS if hasattr(module, one)), None)
    known = None if name is None else getattr(module, name)
    return name if isinstance(known, float) and known > 0 else None


def _all_that_it_says(module: nn.Module) -> Hashable:
    """Return a key that layers share which compute the same from the same weight.

    They are of one class, and have the same attributes: two of a class may have other flags. A
    layer that has more than plain values, say a list, shares it with none.
    """
    own = {name: one for name, one in vars(module).items() if name not in _OF_ANY_MODULE}
    weight: Any = module.weight
    if not all(type(one) in _PLAIN for one in own.values()):
        return id(module)
    told = tuple((name, type(own[name]), repr(own[name])) for name in sorted(own))
    return type(module), weight.shape, weight.dtype, weight.device, told


def _is_plain(module: nn.Module, eps: float) -> bool:
    """Return whether a layer computes the formula, by what it makes of random values.

    They are [2, 3, width], so a norm over more than the last dim is seen. The mean square of a row
    is about 1, eps, or 0: where eps is added shows in the last two.
    """
    weight: Any = module.weight
    if weight.dtype != torch.float32 or weight.is_meta:
        return False
    shape = (2, 3, weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    rows, push, scale = (
        torch.randn(one, generator=generator).to(weight.device) for one in (shape, shape, shape[2:])
    )
    rows *= rows.new_tensor((1.0, eps**0.5, 0.0)).unsqueeze(-1)
    expected = _values_and_gradients(partial(plain_norm, eps=eps), rows, scale, push)
    training = module.training
    with leaving_no_trace(module):
        try:
            for mode in (True, False):
                module.training = mode
                before = dict(vars(module))
                found = _values_and_gradients(partial(_own_norm, module), rows, scale, push)
                after = vars(module)
                if before.keys() != after.keys() or any(before[k] is not after[k] for k in before):
                    return False  # it does more than to compute
                if not all(map(_near, found, expected)):
                    return False
        except Exception:  # whatever it says: it takes or gives something else
            return False
        finally:
            module.training = training
    return True


def _own_norm(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what the class of a layer computes with a weight; no hook of the layer is called."""
    own = module._parameters["weight"]
    held: dict[str, Any] = module._parameters
    held["weight"] = weight
    try:
        return type(module).forward(module, x)
    finally:
        held["weight"] = own


@torch.enable_grad()
def _values_and_gradients(
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    scale: torch.Tensor,
    push: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    x, weight = rows.clone().requires_grad_(), scale.clone().requires_grad_()
    y = norm(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), push)


def _near(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same but for rounding, row by row."""
    apart = (mine - other).abs().amax(-1)
    return mine.dtype == other.dtype and bool((apart <= _NEAR * other.abs().amax(-1)).all())
