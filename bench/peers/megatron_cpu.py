"""Let megatron-core run without a GPU: the `torch.cuda` calls on its way do nothing here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


class _Nothing:
    """Stand for a stream or an event; every call and attribute is itself."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __getattr__(self, _: str) -> _Nothing:
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> bool:
        return False


def pretend_cuda() -> None:
    """Replace what megatron-core asks of `torch.cuda`, and send "cuda" tensors to the CPU."""
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *_, **__: None
    cuda.set_device = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: _Nothing()
    cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.Stream = _Nothing
    cuda.Event = _Nothing
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.memory_allocated = lambda *_, **__: 0
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.FloatTensor = torch.FloatTensor
    anything: Any = torch
    anything.Tensor.cuda = lambda tensor, *_, **__: tensor
    anything.nn.Module.cuda = lambda module, *_, **__: module
    anything.Tensor.type = _type_on_cuda(torch.Tensor.type)
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand"):
        setattr(torch, name, _on_cpu(getattr(torch, name), cpu))


def _type_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type` with names as on a GPU, which the distributed optimizer insists on."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return call


def _on_cpu(function: Callable[..., Any], cpu: torch.device) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = cpu
        return function(*args, **kwargs)

    return call
