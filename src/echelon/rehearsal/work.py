# SPDX-License-Identifier: Apache-2.0
"""What a rank gives its device to do: kernels, the bytes that they read and write, and FLOPs.

A kernel is an operation of PyTorch that is no view and makes no memory only. Its bytes are those of
all that it is given and of all that it makes: what a kernel of its own moves. Of products the sizes
are kept, of attention how many keys a query meets: a device does not reach the same rate in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

_NO_KERNEL = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "detach_",
        "alias",
        "set_",
        "resize_",
        "lift_fresh",
        "_unsafe_view",
        "_reshape_alias",
    }
)


_FACTORS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "_grouped_mm": (0, 1),
    "_scaled_mm": (0, 1),
}
"""Where the two matrices stand among the arguments of a product."""


_PUBLISHING = {"update_adamw": 3, "update_sgd": 3}
"""Updates in one pass, and where the parameters stand among their arguments."""


class Product(NamedTuple):
    """Give the sizes of a product of matrices: [rows, depth] by [depth, columns], so many times."""

    rows: int
    depth: int
    columns: int
    element: int
    """Bytes of an element of what is multiplied."""
    times: int = 1


class KernelWork(NamedTuple):
    """Say what a kernel costs a device."""

    name: str
    num_bytes: int
    """Bytes that it reads and writes."""
    flops: int
    product: Product | None = None
    """The product that it is."""
    done: float = 1.0
    """The share of its FLOPs that are done: of attention a causal mask hides half."""
    keys: float = 0.0
    """The mean number of keys that a query meets, of attention."""


@dataclass(slots=True)
class Work:
    """Add up what one kind of task launches: kernels, bytes, FLOPs; kernels by name, and each."""

    kernels: int = 0
    bytes: int = 0
    flops: int = 0
    by_name: Counter[str] = field(default_factory=Counter[str])
    bytes_by_name: Counter[str] = field(default_factory=Counter[str])
    each: Counter[KernelWork] = field(default_factory=Counter[KernelWork])

    def add(self, kernel: KernelWork, times: int = 1) -> None:
        """Add a kernel, launched `times` times."""
        self.kernels += times
        self.bytes += times * kernel.num_bytes
        self.flops += times * kernel.flops
        self.by_name[kernel.name] += times
        self.bytes_by_name[kernel.name] += times * kernel.num_bytes
        self.each[kernel] += times

    def minus(self, other: Work) -> Work:
        """Return what this does beyond another."""
        names = Counter(self.by_name)
        names.subtract(other.by_name)
        sizes = Counter(self.bytes_by_name)
        sizes.subtract(other.bytes_by_name)
        each = Counter(self.each)
        each.subtract(other.each)
        return Work(
            self.kernels - other.kernels,
            self.bytes - other.bytes,
            self.flops - other.flops,
            Counter({name: count for name, count in names.items() if count}),
            Counter({name: count for name, count in sizes.items() if count}),
            Counter({one: count for one, count in each.items() if count}),
        )


def kernel_work(func: Any, given: Sequence[torch.Tensor], args: Any, out: Any) -> KernelWork | None:
    """Return what an operation costs a device; None where there is nothing to run.

    What it changes in place it reads and writes.
    """
    name = func._schema.name.rpartition("::")[2]
    if name in _NO_KERNEL:
        return None
    positional, named = args
    num_bytes = sum(one.nbytes for one in given)
    num_bytes -= sum(one.nbytes for one in tensors_in(named.get("out")))
    num_bytes += sum(one.nbytes for one in tensors_in(out))
    if not func._schema.returns:
        written = [one.alias_info is not None for one in func._schema.arguments]
        num_bytes += sum(
            one.nbytes
            for arg, is_written in zip(positional, written, strict=False)
            for one in tensors_in(arg if is_written else None)
        )
    if name in _PUBLISHING:
        # What parameters are published as is written only.
        num_bytes -= sum(one.nbytes for one in tensors_in(positional[_PUBLISHING[name]]))
    product = _product(name, positional, out)
    if name == "_grouped_mm":
        flops = _grouped_flops(positional[0], positional[1], out)
        return KernelWork(name, num_bytes, flops, product)
    if name == "grouped_weight_gradient_":
        sums, dy, x, _, fresh = positional
        # What is overwritten is not read.
        each = len(dy) // max(1, len(sums))
        product = Product(dy.shape[1], each, x.shape[1], dy.element_size(), len(sums))
        flops = 2 * dy.numel() * x.shape[-1]
        return KernelWork(name, num_bytes - int(fresh) * sums.nbytes, flops, product)
    if name in _WINDOWED:
        return KernelWork(name, num_bytes, *_windowed(name, positional, named))
    formula = flop_registry.get(func._overloadpacket)
    # Where the dtype of a product is asked for, the formula would take it for a shape.
    shaped = [one for one in positional if not isinstance(one, torch.dtype)]
    flops = 0 if formula is None else int(formula(*shaped, **named, out_val=out))
    if product is None and "attention" in name and flops:
        return KernelWork(name, num_bytes, flops, None, *_reached(func, positional, named))
    return KernelWork(name, num_bytes, flops, product)


def _product(name: str, positional: Sequence[Any], out: Any) -> Product | None:
    """Return the sizes of a product; None where an operation is none."""
    if name not in _FACTORS:
        return None
    a, b = (positional[place] for place in _FACTORS[name])
    times = a.shape[0] if a.dim() == 3 else 1
    rows, depth = a.shape[-2:]
    if name == "_grouped_mm":
        # Groups of rows; or (out has three dims) of what is summed.
        times = b.shape[0] if out.dim() == 2 else out.shape[0]
        rows, depth = (rows // times, depth) if out.dim() == 2 else (rows, depth // times)
    return Product(int(rows), int(depth), int(b.shape[-1]), a.element_size(), int(times))


def _reached(func: Any, positional: Sequence[Any], named: Any) -> tuple[float, float]:
    """Return the share of the FLOPs of attention that are done, and the keys that a query meets.

    Queries are [batch, heads, length, width], backward too, where a gradient stands before them.
    """
    names = [one.name for one in func._schema.arguments]
    given = {**dict(zip(names, positional, strict=False)), **named}
    share = 0.5 if given.get("is_causal") else 1.0
    return share, share * given["key"].shape[-2]


_WINDOWED = {"_flash_attention_forward": 2, "_flash_attention_backward": 5}
"""Kernels of attention that are told a window, and how many products they make of each pair."""


def _windowed(
    name: str, positional: Sequence[Any], named: Mapping[str, Any]
) -> tuple[int, None, float, float]:
    """Return the FLOPs of attention with a window, the most that its lengths allow; the share of
    them that is done, and the keys that a query meets.

    PyTorch's table takes the sizes in another order, and knows no window; as it does, a causal mask
    is counted as if all pairs were computed.
    """
    if name.endswith("backward"):
        _, q, _, _, _, _, starts, _, _, most_k, *_ = positional
    else:
        q, _, _, starts, _, _, most_k, *_ = positional
    rows = q.shape[0] if starts is not None else q.shape[0] * q.shape[1]
    left, right = named["window_size_left"], named["window_size_right"]
    met = most_k if left < 0 or right < 0 else min(most_k, left + right + 1)
    share = 0.5 if right == 0 and met == most_k else 1.0
    flops = 2 * _WINDOWED[name] * rows * met * q.shape[-2] * q.shape[-1]
    return flops, None, share, share * met


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> int:
    """Return the FLOPs of products of groups: of rows, or (out has three dims) of what is summed.

    PyTorch's table of formulas does not have them.
    """
    if out.dim() == 2:
        return 2 * out.numel() * a.shape[-1]
    return 2 * a.numel() * b.shape[-1]


class WorkCounter:
    """Count kernels by the kind of the task in which they are launched."""

    def __init__(self) -> None:
        """Begin with none."""
        self.by_task: dict[str, Work] = {}

    def kernels(self) -> Counter[KernelWork]:
        """Return the number of launches of each kernel, of all tasks."""
        total = Counter[KernelWork]()
        for work in self.by_task.values():
            total += work.each
        return total

    def ran(self, task: str, kernel: KernelWork | None, times: int = 1) -> None:
        """Count a kernel, launched `times` times."""
        if kernel is not None:
            work = self.by_task.get(task)
            if work is None:
                work = self.by_task[task] = Work()
            work.add(kernel, times)


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of arguments or results, which may be in lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from tensors_in(one)
