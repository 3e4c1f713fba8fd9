# SPDX-License-Identifier: Apache-2.0
"""The pieces between products as operators of PyTorch, one kernel each, whoever provides it.

On a GPU an operator is a kernel in Triton (`norm_triton.py` and its neighbours), or what PyTorch's
compiler makes of the formula (`piece_formulas.py`); on a CPU the latter, or the formula itself,
operation by operation: so a plan with kernels for GPUs is proven where there are none. On tensors
without elements the formula says what comes out, and a rehearsal counts one kernel, with all that
it reads and writes.

An operator is opaque to the compiler and to autograd: gradients are written by hand around it
(`piece_functions.py`), those of weights go to the GradientStore, and nothing else about a rank
changes. Which way is taken is an argument of each, `provider`: "triton" or "compiled".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

import torch

from echelon.parallel.kernels import piece_formulas

_LIBRARY = torch.library.Library("echelon", "FRAGMENT")

_ROOM = "echelon.parallel.kernels"
_IN_TRITON = {
    "norm": f"{_ROOM}.norm_triton",
    "add_norm": f"{_ROOM}.norm_triton",
    "norm_backward": f"{_ROOM}.norm_triton",
    "rotate": f"{_ROOM}.rotary_triton",
    "heads": f"{_ROOM}.rotary_triton",
    "heads_backward": f"{_ROOM}.rotary_triton",
    "swiglu": f"{_ROOM}.swiglu_triton",
    "weighted_swiglu": f"{_ROOM}.swiglu_triton",
    "swiglu_backward": f"{_ROOM}.swiglu_triton",
    "weighted_swiglu_backward": f"{_ROOM}.swiglu_triton",
}
"""The file of each kernel in Triton; the loss has its own operators (`cross_entropy.py`)."""

_SUMS = frozenset({"norm_backward", "heads_backward"})
"""Formulas with sums over rows: a compiler makes one sum of them, Triton's kernels partial ones."""

Optional = torch.Tensor | None


@cache
def compiled(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a formula as PyTorch's compiler makes it; casts round as they do uncompiled.

    The compiler keeps a few versions of a function, for kinds of shapes: each dtype is a function
    of its own, so that there are enough of them.
    """
    formula = getattr(piece_formulas, name)
    code = formula.__code__.replace(co_name=f"{name}_{str(dtype).rpartition('.')[2]}")
    own = FunctionType(code, formula.__globals__)
    return torch.compile(own, fullgraph=True, options={"emulate_precision_casts": True})


def _computed(name: str, provider: str, on_gpu: bool, *args: Any) -> Any:
    if provider == "triton" and on_gpu:
        return getattr(import_module(_IN_TRITON[name]), name)(*args)
    whole = {"whole": provider == "compiled"} if name in _SUMS else {}
    first: torch.Tensor = args[0][0] if isinstance(args[0], tuple) else args[0]
    # A compiler makes other kernels for one row, or none; experts may have as few.
    if provider == "compiled" and not first.is_meta and first.shape[0] > 1:
        return compiled(name, first.dtype)(*args, **whole)
    return getattr(piece_formulas, name)(*args, **whole)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, provider: str) -> Any:
    return _computed("norm", provider, x.is_cuda, x, weight, eps)


def _add_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, provider: str
) -> Any:
    return _computed("add_norm", provider, x.is_cuda, x, y, weight, eps)


def _norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    around: Optional,
    provider: str,
) -> Any:
    return _computed("norm_backward", provider, x.is_cuda, dy, x, inverse, weight, around)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int, provider: str
) -> Any:
    return _computed("rotate", provider, x.is_cuda, x, cos, sin, direction)


def _heads(
    qk: torch.Tensor,
    num_queries: int,
    tables: list[torch.Tensor],
    weights: list[torch.Tensor],
    eps: float,
    provider: str,
) -> Any:
    args = (qk, num_queries, tuple(tables), tuple(weights) or None, eps)
    return _computed("heads", provider, qk.is_cuda, *args)


def _heads_backward(
    gradients: list[torch.Tensor],
    tables: list[torch.Tensor],
    normed: list[torch.Tensor],
    provider: str,
) -> Any:
    args = (tuple(gradients), tuple(tables), tuple(normed) or None)
    return _computed("heads_backward", provider, gradients[0].is_cuda, *args)


def _swiglu(gate_up: torch.Tensor, weights: Optional, provider: str) -> Any:
    if weights is None:
        return _computed("swiglu", provider, gate_up.is_cuda, gate_up)
    return _computed("weighted_swiglu", provider, gate_up.is_cuda, gate_up, weights)


def _swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor, provider: str) -> Any:
    return _computed("swiglu_backward", provider, dy.is_cuda, dy, gate_up)


def _weighted_swiglu_backward(
    dy: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, provider: str
) -> Any:
    return _computed("weighted_swiglu_backward", provider, dy.is_cuda, dy, gate_up, weights)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "piece_norm(Tensor x, Tensor weight, float eps, str provider) -> (Tensor, Tensor)": _norm,
    "piece_add_norm(Tensor x, Tensor y, Tensor weight, float eps, str provider)"
    " -> (Tensor, Tensor, Tensor)": _add_norm,
    "piece_norm_backward(Tensor dy, Tensor x, Tensor inverse, Tensor weight, Tensor? around,"
    " str provider) -> (Tensor, Tensor)": _norm_backward,
    "piece_rotate(Tensor x, Tensor cos, Tensor sin, int direction, str provider)"
    " -> Tensor": _rotate,
    "piece_heads(Tensor qk, int num_queries, Tensor[] tables, Tensor[] weights, float eps,"
    " str provider) -> (Tensor, Tensor, Tensor)": _heads,
    "piece_heads_backward(Tensor[] gradients, Tensor[] tables, Tensor[] normed, str provider)"
    " -> (Tensor, Tensor)": _heads_backward,
    "piece_swiglu(Tensor gate_up, Tensor? weights, str provider) -> Tensor": _swiglu,
    "piece_swiglu_backward(Tensor dy, Tensor gate_up, str provider) -> Tensor": _swiglu_backward,
    "piece_weighted_swiglu_backward(Tensor dy, Tensor gate_up, Tensor weights, str provider)"
    " -> (Tensor, Tensor, Tensor)": _weighted_swiglu_backward,
}
"""Each operator's schema, and what computes it anywhere."""

for _schema, _run in _OPERATORS.items():
    _LIBRARY.define(_schema)
    for _place in ("CPU", "CUDA", "Meta"):
        _LIBRARY.impl(_schema.partition("(")[0], _run, _place)

PIECES: Any = torch.ops.echelon
"""Where the operators are found, by the names above."""
