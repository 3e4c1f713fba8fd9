# SPDX-License-Identifier: Apache-2.0
"""Hooks that see what passes between the modules of a program, and what its loss is of.

On one device and on each rank alike: the output of every named module, the gradient with respect to
it, an input that comes from no module (the stream after a sum), the logits and labels of every
cross-entropy, and what attention is called with. All hooks are taken off again. What is seen is
never a claim of its own: it says where a wrong gradient, or a wrong loss, begins.

Shape suffixes: n tokens, V classes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as fn

from echelon.proof.evidence.run import (
    ITS_INPUT,
    AttentionArguments,
    CountedTokens,
    Passed,
    PassedTensor,
)

MOST_BYTES = 64 * 2**20
"""Bytes that are kept of a run on one rank; what comes later is not compared."""


class PassingWatch:
    """Watch named modules and cross-entropies; `step` says which step it is."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], step: Callable[[], int]) -> None:
        """Name what is to be watched."""
        self.passed = Passed()
        self._modules = list(modules)
        self._step = step
        self._bytes = 0
        self._calls: Counter[tuple[int, str]] = Counter()
        self._made_by: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._seen: set[tuple[int, str, int]] = set()
        self._inside: list[str] = []
        self._ended = ""

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch while the context lasts."""
        handles: list[Any] = []
        for name, module in self._modules:
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._hook_of(name)))
        plain, attention = fn.cross_entropy, fn.scaled_dot_product_attention
        fn.cross_entropy = self._watched(plain, self._count)
        fn.scaled_dot_product_attention = self._watched(attention, self._attend)
        try:
            yield
        finally:
            fn.cross_entropy, fn.scaled_dot_product_attention = plain, attention
            for handle in handles:
                handle.remove()
            self._made_by.clear()

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, inputs: Any) -> None:
            if _is_first_pass():
                self._inside.append(name)
                value, step = _first_tensor(inputs), self._step()
                if value is not None and value.device.type != "meta" and not self._maker_of(value):
                    self._keep(step, f"{name}{ITS_INPUT}", self._calls[step, name], value)

        return hook

    def _hook_of(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            if not _is_first_pass():
                return
            while self._inside and self._inside.pop() != name:
                pass
            self._ended = name
            value = _first_tensor(output)
            if value is None or value.device.type == "meta":
                return
            step = self._step()
            call = self._calls[step, name]
            self._calls[step, name] += 1
            self._keep(step, name, call, value, source=self._maker_of(_first_tensor(inputs)))
            self._made_by[id(value)] = name, weakref.ref(value)
            if value.requires_grad:
                value.register_hook(self._gradient_hook(step, name, call))

        return hook

    def _maker_of(self, value: torch.Tensor | None) -> str:
        name, made = self._made_by.get(id(value), ("", None))
        # The number of a tensor that is gone may be another's now.
        return name if made is not None and value is not None and made() is value else ""

    def _gradient_hook(self, step: int, name: str, call: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            # A backward that is made in two halves may come twice.
            if (step, name, call) not in self._seen:
                self._seen.add((step, name, call))
                self._keep(step, name, call, gradient, gradient=True)

        return hook

    def _keep(self, step: int, name: str, call: int, value: torch.Tensor, **more: Any) -> None:
        local = _local(value)
        if self._has_room(local):
            self.passed.tensors.append(
                PassedTensor(
                    step=step,
                    name=name,
                    call=call,
                    gradient=bool(more.get("gradient")),
                    values=local.cpu().clone(),
                    source=str(more.get("source", "")),
                )
            )

    def _has_room(self, value: torch.Tensor) -> bool:
        self._bytes += value.numel() * value.element_size()
        return self._bytes <= MOST_BYTES

    def _watched(
        self,
        plain: Callable[..., torch.Tensor],
        look: Callable[[tuple[Any, ...], dict[str, Any]], None],
    ) -> Callable[..., torch.Tensor]:
        def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_first_pass():
                look(args, kwargs)
            return plain(*args, **kwargs)

        return watched

    def _attend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keys = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(keys, args, strict=False)), **kwargs}
        tensors = [given.get(key) for key in ("query", "key", "value")]
        if any(not torch.is_tensor(tensor) or tensor.dim() != 4 for tensor in tensors):
            return
        q, k, v = (_local(tensor) for tensor in tensors if tensor is not None)
        mask, step, name = given.get("attn_mask"), self._step(), [self._ended, *self._inside][-1]
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        if mask is not None:
            mask = _local(mask)
            allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        elif given.get("is_causal"):
            allowed = allowed.tril()
        if self._has_room(q) and self._has_room(k) and self._has_room(v):
            scale = given.get("scale")
            self.passed.attention.append(
                AttentionArguments(
                    step=step,
                    name=name,
                    call=self._calls[step, name],
                    q_BHTd=q.cpu().clone(),
                    k_BHSd=k.cpu().clone(),
                    v_BHSd=v.cpu().clone(),
                    allowed=allowed.detach().cpu().clone(),
                    scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
                )
            )

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logits = args[0] if args else kwargs.get("input")
        labels = args[1] if len(args) > 1 else kwargs.get("target")
        # Probabilities as targets are not counted.
        if not torch.is_tensor(logits) or not torch.is_tensor(labels) or labels.is_floating_point():
            return
        classes = 1 if logits.dim() > 1 else 0
        whole = None
        labels = _local(labels)
        if not isinstance(logits, DTensor):
            whole = logits.detach().movedim(classes, -1)
            whole = whole.reshape(-1, whole.shape[-1])
            if not self._has_room(whole):
                return
        self.passed.tokens.append(
            CountedTokens(
                step=self._step(),
                labels_n=labels.detach().reshape(-1).cpu().clone(),
                num_classes=int(logits.shape[classes]),
                ignored=int(kwargs.get("ignore_index", -100)),
                logits_nV=None if whole is None else whole.cpu().clone(),
            )
        )


def _is_first_pass() -> bool:
    """False for compiled code, which has no hooks of ours, and for a recomputed pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


def _first_tensor(given: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of what a module takes or gives."""
    if isinstance(given, (tuple, list)):
        given = given[0] if given else None
    elif hasattr(given, "to_tuple"):
        return None
    return given if torch.is_tensor(given) and given.is_floating_point() else None


def _local(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, sums that are due not made."""
    found: Any = value.detach()
    return found._local_tensor if isinstance(found, DTensor) else found
