"""Compile every kernel in Triton for a GPU where there is none: run this with ``python -m``.

The functions that launch kernels are called on a CPU, with a launcher in the place of each kernel
that compiles it for the arguments that it is given. A line for each says its name and what a
program of it takes.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from echelon.parallel.kernels import piece_formulas

TARGET = ("cuda", 90, 32)
"""Hopper: an H100 or H200."""
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_ROOM = "echelon.parallel.kernels"


@dataclass
class Compiled:
    """Compile a kernel in place of launching it."""

    kernel: Any
    name: str
    tell: Callable[[str], None]
    seen: set[str] = field(default_factory=set)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return what stands for a launch over a grid."""
        return self._compile

    def _compile(
        self, *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
    ) -> None:
        compiler, backends = (
            import_module(f"triton.{one}") for one in ("compiler", "backends.compiler")
        )
        names = self.kernel.arg_names
        signature = dict(zip(names, map(_type_of, args), strict=False))
        signature |= dict.fromkeys(constants, "constexpr")
        # As at a launch: what is a multiple of 16 is known to be.
        even = {(place,): [["tt.divisibility", 16]] for place, one in enumerate(args) if _even(one)}
        source = compiler.ASTSource(
            fn=self.kernel, signature=signature, constexprs=constants, attrs=even
        )
        options = {"num_warps": num_warps, "num_stages": num_stages}
        made = compiler.compile(source, target=backends.GPUTarget(*TARGET), options=options)
        told = f"{self.name} {' '.join(map(str, constants.values()))}"
        if told not in self.seen:
            self.seen.add(told)
            self.tell(f"{told}: {num_warps} warps, {_registers(made.asm['cubin'])}")


def _even(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _registers(cubin: bytes) -> str:
    """Return registers and bytes of stack of a thread, as the toolkit beside Triton tells them."""
    package = Path(str(import_module("triton").__file__)).parent
    tool = package / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return "resources unknown"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = (str(tool), "--dump-resource-usage", file.name)
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(one.split(":") for one in told.split() if one.count(":") == 1)
    return f"{found.get('REG')} registers, {found.get('STACK')} bytes of stack"


@contextmanager
def compiling(tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the modules with kernels, by name, none of which launches anything."""
    modules = {
        name: import_module(f"{_ROOM}.{name}_triton")
        for name in ("norm_swiglu", "rotary", "cross_entropy", "update", "expert_kernels")
    }
    replaced: list[tuple[Any, str, Any]] = []
    for module in modules.values():
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernel = getattr(module, name)
            replaced.append((module, name, kernel))
            setattr(module, name, Compiled(kernel, name, tell))
    try:
        yield modules
    finally:
        for module, name, kernel in replaced:
            setattr(module, name, kernel)


def compile_all(hidden: int, ffn: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Compile the kernels of a model: of its widths, its query and key heads, their width."""
    num_q, num_k, width = heads
    rows, qkv = 2, torch.zeros(2, 1, num_q + 2 * num_k, width, dtype=dtype)
    x, weight = torch.zeros(rows, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    gate_up, per_row = torch.zeros(rows, 2 * ffn, dtype=dtype), torch.zeros(rows)
    tables = (torch.zeros(2, width // 2), torch.zeros(2, width // 2))
    norms = (torch.zeros(width, dtype=dtype), torch.zeros(width, dtype=dtype))
    labels = torch.zeros(rows, dtype=torch.int64)
    with compiling(print) as modules:
        norm = swiglu = modules["norm_swiglu"]
        rotary = modules["rotary"]
        norm.norm(x, weight, 1e-5)
        norm.add_norm(x, x, weight, 1e-5)
        for around in (None, x):
            norm.norm_backward(x, x, per_row[:, None], weight, around)
        parts = qkv.split((num_q, num_k, num_k), dim=2)
        both = qkv[:, :, : num_q + num_k]
        for weights in (None, norms):
            inverse = piece_formulas.heads(both, num_q, tables, weights, 1e-5)[2]
            rotary.heads(both, num_q, tables, weights, 1e-5)
            normed = None if weights is None else (both, inverse, *weights)
            rotary.heads_backward(parts, tables, normed)
        swiglu.swiglu(gate_up)
        swiglu.weighted_swiglu(gate_up, per_row)
        swiglu.swiglu_backward(gate_up[:, :ffn], gate_up)
        swiglu.weighted_swiglu_backward(gate_up[:, :ffn], gate_up, per_row)
        loss, at = modules["cross_entropy"], (labels, labels == 0, per_row)
        loss.row_statistics(gate_up, labels)
        loss.overwrite_with_gradient(gate_up, per_row, *at)
        update, flat, master = modules["update"], gate_up.flatten(), torch.zeros(2 * rows * ffn)
        for values in (None, flat):
            moments = (master, master)
            update.adamw(master, flat, moments, values, (0.9, 0.95, 1e-8, 1e-3, 1.0, 0.1), 1)
            for momentum in (0.0, 0.9):
                update.sgd(master, flat, (master,), values, (momentum, 1e-3, 1.0, 0.1))
        ends = torch.full((1,), rows, dtype=torch.int32)
        for kept, fresh in ((torch.float32, False), (dtype, True)):
            sums = torch.zeros(1, ffn, hidden, dtype=kept)
            modules["expert_kernels"].add_grouped_gradient(
                sums, gate_up[:, :ffn], x, ends, fresh=fresh
            )
        modules["expert_kernels"].row_sums(x, labels, labels)


if __name__ == "__main__":
    compile_all(4096, 14336, (32, 8, 128), torch.bfloat16)
