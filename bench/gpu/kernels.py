"""Kernels of a Llama block in bf16 on one device: `python -m bench.gpu.kernels`.

Products, attention in every variant that this torch has, and what moves more than it computes, at
the shapes of a 1B and an 8B model; against the peak of the device. The variants of a table take
turns, the median over turns counts, and a table is printed as soon as it is known. A variant that
fails is named and ends the run with 1; one that is not there is named only. `--device cpu` is a
rehearsal.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as fn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.loads import LOADS, Load, memory_bandwidth, peak_flops
from bench.gpu.pieces import (
    Absent,
    Call,
    Group,
    Timing,
    attention_variants,
    expert_gradients,
    memory_bound,
    normal,
    timed,
    wait,
)
from echelon.parallel.expert import grouped_matmul

SIZES = ("1b", "8b", "tiny")
EXPERTS = 8
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}
FA3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Where FlashAttention 3 is found: what its `hopper` folder installs, in both layouts (memory)."""


NO_KERNEL = ("No available kernel", "No viable backend")
"""What torch 2.13 says where SDPA has no such kernel: on CUDA (from memory), and on a CPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table per group; exit 1 where a variant failed, 3 where torch sees no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kernels", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (cuda)")
    add("--model", choices=SIZES, nargs="+", default=["1b", "8b"], help="whose shapes (1b 8b)")
    add("--steps", type=int, default=10, help="timed calls in a row (10)")
    add("--repeats", type=int, default=5, help="turns of every variant; the median counts (5)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("not run: torch sees no CUDA device", file=sys.stderr)
        return 3
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peaks = {"TFLOP/s": peak_flops(name), "GB/s": memory_bandwidth(name)}
    failed = False
    for model in options.model:
        for group in groups(LOADS[model], device):
            lines, bad = table(group, options, peaks[group.unit], device)
            failed |= bad
            print("\n".join([*lines, ""]), flush=True)
    return int(failed)


def table(
    group: Group, options: argparse.Namespace, peak: float | None, device: torch.device
) -> tuple[list[str], bool]:
    """Return the lines of a group's table, and whether a variant failed."""
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    failed = False
    for timing in group.timings:
        try:
            call = timing.make()
            call()
            wait(device)
        except Absent as reason:
            reasons[timing.name] = str(reason)
        except Exception as error:  # whatever a kernel raises must not end the others
            said = str(error).strip().splitlines() or [type(error).__name__]
            reasons[timing.name] = f"failed: {said[0][:120]}".replace("|", "/")
            failed = True
        else:
            calls[timing.name] = call
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.repeats):
        for name, call in calls.items():
            taken[name].append(timed(call, options.steps, device))
    lines = [group.title, "", f"| variant | us | spread | {group.unit} | of peak |"]
    lines.append("|---|---|---|---|---|")
    for timing in group.timings:
        if timing.name in reasons:
            lines.append(f"| {timing.name} | not run: {reasons[timing.name]} | | | |")
        else:
            lines.append(_row(timing, taken[timing.name], group.unit, peak))
    return lines, failed


def _row(timing: Timing, taken: Sequence[float], unit: str, peak: float | None) -> str:
    middle = statistics.median(taken)
    rate = timing.work / middle
    spread = (max(taken) - min(taken)) / middle
    shown = rate / (1e12 if unit == "TFLOP/s" else 1e9)
    share = "-" if peak is None else f"{rate / peak:.1%}"
    return f"| {timing.name} | {middle * 1e6:.1f} | {spread:.0%} | {shown:.2f} | {share} |"


def groups(load: Load, device: torch.device) -> Iterator[Group]:
    """Yield the groups of a model's shapes; forward and backward where not said otherwise."""
    tokens = load.tokens
    title = f"{load.name}, {load.sequences} x {load.length}"
    yield Group(title=f"{title}: mm", unit="TFLOP/s", timings=list(_products(load, device)))
    attention = f"{title}: causal attention, forward and backward"
    yield Group(title=attention, unit="TFLOP/s", timings=list(_attention(load, device)))
    grouped = f"{title}: products of {EXPERTS} experts, {tokens} rows, forward"
    yield Group(title=grouped, unit="TFLOP/s", timings=list(_grouped(load, device)))
    title_of_ours = f"{title}: the engine's attention, visible pairs, forward and backward"
    ours = list(attention_variants(load, device))
    yield Group(title=title_of_ours, unit="TFLOP/s", timings=ours)
    weights = f"{title}: gradients of one matrix of {EXPERTS} experts, in float32"
    adding = list(expert_gradients(load, device, EXPERTS))
    yield Group(title=weights, unit="TFLOP/s", timings=adding)
    memory = f"{title}: bound by memory, forward and backward (fewest bytes that must move)"
    yield Group(title=memory, unit="GB/s", timings=list(memory_bound(load, device)))


def _products(load: Load, device: torch.device) -> Iterator[Timing]:
    shape, rows = load.shape, load.tokens
    matrices = {
        "qkv": (shape.query_dim + 2 * shape.kv_dim, shape.hidden),
        "attention output": (shape.hidden, shape.query_dim),
        "gate and up": (2 * shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
        "head": (shape.vocab, shape.hidden),
    }
    for name, (out, inner) in matrices.items():

        def make(out: int = out, inner: int = inner) -> Call:
            x_NI, weight_OI = normal(device, rows, inner), normal(device, out, inner)
            return lambda: torch.mm(x_NI, weight_OI.t())

        yield Timing(
            name=f"{name} [{rows}, {inner}] x [{inner}, {out}]",
            work=2.0 * rows * out * inner,
            make=make,
        )


def _attention(load: Load, device: torch.device) -> Iterator[Timing]:
    shape = load.shape
    # QK^T and PV of the causal half; backward is five products for these two (FlashAttention-2).
    forward = 2.0 * load.sequences * load.length**2 * shape.heads * shape.head_dim
    work = forward * 3.5
    for name, backend in BACKENDS.items():

        def make(backend: SDPBackend = backend) -> Call:
            return _sdpa(load, device, backend)

        yield Timing(name=f"SDPA {name}", work=work, make=make)
    yield Timing(name="FlashAttention 3", work=work, make=lambda: _flash3(load, device))


def _heads(load: Load, device: torch.device, heads: int) -> torch.Tensor:
    """Return [B, T, H, E]."""
    return normal(device, load.sequences, load.length, heads, load.shape.head_dim, grad=True)


def _sdpa(load: Load, device: torch.device, backend: SDPBackend) -> Call:
    shape = load.shape
    q, k, v = (_heads(load, device, n) for n in (shape.heads, shape.kv_heads, shape.kv_heads))
    dy = normal(device, load.sequences, shape.heads, load.length, shape.head_dim)
    # The efficient kernel has no grouped heads: keys and values are repeated for it alone.
    repeats = shape.heads // shape.kv_heads if backend is SDPBackend.EFFICIENT_ATTENTION else 1

    def call() -> None:
        keys, values = (x.transpose(1, 2) for x in (k, v))
        if repeats > 1:
            keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
        with sdpa_kernel(backend):
            y = fn.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, is_causal=True, enable_gqa=repeats == 1
            )
        torch.autograd.grad(y, (q, k, v), dy)

    try:
        call()
    except RuntimeError as error:
        if any(said in str(error) for said in NO_KERNEL):
            raise Absent("torch has no such kernel for this device and shape") from error
        raise
    return call


def _flash3(load: Load, device: torch.device) -> Call:
    for name in FA3_MODULES:
        try:
            found: Any = importlib.import_module(name)
        except ImportError:
            continue
        break
    else:
        raise Absent("no flash_attn_interface or flash_attn_3 is installed")
    shape = load.shape
    q, k, v = (_heads(load, device, n) for n in (shape.heads, shape.kv_heads, shape.kv_heads))
    dy = normal(device, load.sequences, load.length, shape.heads, shape.head_dim)

    def call() -> None:
        out = found.flash_attn_func(q, k, v, causal=True)
        torch.autograd.grad(out[0] if isinstance(out, tuple) else out, (q, k, v), dy)

    return call


def _grouped(load: Load, device: torch.device) -> Iterator[Timing]:
    shape, rows = load.shape, load.tokens
    work = 2.0 * rows * shape.hidden * shape.ffn
    counts = [rows // EXPERTS] * EXPERTS

    def tensors() -> tuple[torch.Tensor, torch.Tensor]:
        return normal(device, rows, shape.hidden), normal(device, EXPERTS, shape.ffn, shape.hidden)

    def one_launch() -> Call:
        x_RI, weight_EOI = tensors()
        if not grouped_matmul.has_grouped_kernel(x_RI):
            raise Absent("this device has no grouped product")
        ends_E = grouped_matmul.row_ends(counts, device)
        return lambda: grouped_matmul.grouped_matmul(x_RI, weight_EOI, ends_E)

    def one_by_one() -> Call:
        x_RI, weight_EOI = tensors()
        return lambda: [
            x @ weight.t() for x, weight in zip(x_RI.split(counts), weight_EOI, strict=True)
        ]

    yield Timing(name="one launch", work=work, make=one_launch)
    yield Timing(name="one after the other", work=work, make=one_by_one)


if __name__ == "__main__":
    sys.exit(main())
