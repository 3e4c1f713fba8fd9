"""What a rank gives its device to do: kernels, the bytes that they read and write, and FLOPs.

A kernel is an operation of PyTorch that is no view and makes no memory only. Its bytes are those of
all that it is given and of all that it makes: what a kernel of its own moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(slots=True)
class Work:
    """Add up what one kind of task launches: kernels, bytes, FLOPs; kernels by name."""

    kernels: int = 0
    bytes: int = 0
    flops: int = 0
    by_name: Counter[str] = field(default_factory=Counter[str])
    bytes_by_name: Counter[str] = field(default_factory=Counter[str])

    def add(self, name: str, num_bytes: int, flops: int) -> None:
        """Add a kernel."""
        self.kernels += 1
        self.bytes += num_bytes
        self.flops += flops
        self.by_name[name] += 1
        self.bytes_by_name[name] += num_bytes

    def minus(self, other: Work) -> Work:
        """Return what this does beyond another."""
        names = Counter(self.by_name)
        names.subtract(other.by_name)
        sizes = Counter(self.bytes_by_name)
        sizes.subtract(other.bytes_by_name)
        return Work(
            self.kernels - other.kernels,
            self.bytes - other.bytes,
            self.flops - other.flops,
            Counter({name: count for name, count in names.items() if count}),
            Counter({name: count for name, count in sizes.items() if count}),
        )


KernelWork = tuple[str, int, int]
"""The name of a kernel, the bytes that it reads and writes, and its FLOPs."""


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
    if name == "_grouped_mm":
        return name, num_bytes, _grouped_flops(positional[0], positional[1], out)
    formula = flop_registry.get(func._overloadpacket)
    # Where the dtype of a product is asked for, the formula would take it for a shape.
    shaped = [one for one in positional if not isinstance(one, torch.dtype)]
    flops = 0 if formula is None else int(formula(*shaped, **named, out_val=out))
    return name, num_bytes, flops


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

    def ran(self, task: str, kernel: KernelWork | None) -> None:
        """Count a kernel."""
        if kernel is not None:
            work = self.by_task.get(task)
            if work is None:
                work = self.by_task[task] = Work()
            work.add(*kernel)


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of arguments or results, which may be in lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from tensors_in(one)
