# SPDX-License-Identifier: Apache-2.0
"""Measure kernels and collectives on every rank of a pool at the same time.

A kernel (products, attention, moves, updates) runs for a window of time on all ranks at once, so
that what ranks share (cores, memory) is shared as in a step, and takes a part of it over the number
of runs. Inputs are drawn from normal numbers: denormals and zeros have speeds of their own.

Collectives of 2 to all ranks are the calls that a run makes. Groups of neighbours are measured one
at a time, those of ranks that are apart together with the groups beside them, as a run has them:
all ranks of a node then send to other nodes at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional as fn

from echelon.config.files.measurements import Journal, measurement_name
from echelon.core.event import NoEvents
from echelon.core.plan import DType, Optimizer
from echelon.cost.fit.samples import (
    Collective,
    FusedAttentionKernel,
    LaunchKernel,
    MatmulKernel,
    MeasuredKernel,
    MemoryKernel,
    OptimizerKernel,
)
from echelon.launch.context import RankContext
from echelon.models.precision import TORCH_DTYPES
from echelon.parallel.transport.collectives import Communicator, Group
from echelon.parallel.transport.recorder import Recorder
from echelon.training.optimizer.elementwise import AdamW
from echelon.training.optimizer.trained_ranges import FusedOperands

Run = Callable[[], object]
LEAST_RUNS = 3  # runs
PARTS = 5  # of a window
_FEW = 16  # elements

MOST_RUNS = 64  # runs
NAME = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelJob:
    """Say what ranks measure: kernels in `dtype`, each for `window_s`.

    `running` ranks of a node are at work at once. The first rank writes each into `journal`.
    """

    kernels: Sequence[MeasuredKernel]
    dtype: DType
    window_s: float
    threads: int = 1
    running: int = 1
    journal: Journal | None = None


def measure_kernels(context: RankContext, job: KernelJob) -> list[float]:
    """Return the mean seconds of each kernel on all ranks of the job, which run it at once."""
    torch.set_num_threads(job.threads)
    dtype = TORCH_DTYPES[job.dtype]
    found: list[float] = []
    for kernel in job.kernels:
        context.progress.mark(f"measuring {kernel}")
        run = prepared(kernel, dtype, context.device)
        for _ in range(LEAST_RUNS):
            run()
        _settle(context.device)
        _wait_for_all(context)
        found.append(_mean(seconds_of(run, context.device, job.window_s), context))
        if job.journal is not None and context.rank == 0:
            job.journal.append(measurement_name(kernel, running=job.running), found[-1])
    return found


def seconds_of(run: Run, device: torch.device, window_s: float) -> float:
    """Return the seconds of one run: the median of parts of the window, at least three runs each.

    A part is long enough for ranks to take turns on a core; what else the machine does meanwhile
    falls into few of them.
    """
    return median(_part(run, device, window_s / PARTS) for _ in range(PARTS))


def _part(run: Run, device: torch.device, part_s: float) -> float:
    clock = _clock(device)
    start, runs, now = clock(), 0, 0.0
    while runs < LEAST_RUNS or now - start < part_s:
        # Runs that take a few milliseconds: the clock and the device are asked between.
        some_ms = int(0.004 * runs / max(now - start, 1e-9))
        many = 1 if runs < LEAST_RUNS else max(1, min(1000, some_ms))
        for _ in range(many):
            run()
        runs += many
        _settle(device)
        now = clock()
    return (now - start) / runs


def _clock(device: torch.device) -> Callable[[], float]:
    """Return what kernels are timed by.

    One thread on a processor is timed by its own seconds: what else the machine does, and how ranks
    take turns on its cores, is not in them.
    """
    own = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if own else time.perf_counter


def prepared(kernel: MeasuredKernel, dtype: torch.dtype, device: torch.device) -> Run:
    """Return a function that runs `kernel` once; its operands are there already."""
    match kernel:
        case MatmulKernel():
            return _matmul(kernel, dtype, device)
        case FusedAttentionKernel():
            return _attention(kernel, dtype, device)
        case MemoryKernel():
            return _memory_bound(kernel, dtype, device)
        case OptimizerKernel():
            return _update(kernel, device)
        case LaunchKernel():
            return _dispatch(kernel, dtype, device)


def _matmul(kernel: MatmulKernel, dtype: torch.dtype, device: torch.device) -> Run:
    many = (kernel.batch,) if kernel.batch > 1 else ()
    left = _drawn((*many, kernel.rows, kernel.depth), dtype, device)
    # The weight lies as a linear layer has it, [columns, depth].
    right = _drawn((*many, kernel.columns, kernel.depth), dtype, device).transpose(-1, -2)
    if many:
        return lambda: torch.bmm(left, right)
    return lambda: torch.mm(left, right)


def _attention(kernel: FusedAttentionKernel, dtype: torch.dtype, device: torch.device) -> Run:
    shape = (kernel.sequences, kernel.heads, kernel.length, kernel.head_dim)
    q, k, v = (_drawn(shape, dtype, device).requires_grad_(kernel.backward) for _ in range(3))
    if not kernel.backward:
        return lambda: fn.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _memory_bound(kernel: MemoryKernel, dtype: torch.dtype, device: torch.device) -> Run:
    """Return an operator on so many elements that it reads and writes the kernel's bytes."""
    tensors = {"copy": 2, "add": 3, "norm": 2, "softmax": 2, "gate": 3}[kernel.name]
    width = 128
    rows = max(1, kernel.num_bytes // (tensors * dtype.itemsize * width))
    x, y = (_drawn((rows, width), dtype, device) for _ in range(2))
    out, weight = torch.empty_like(x), torch.ones(width, dtype=dtype, device=device)
    runs: dict[str, Run] = {
        "copy": lambda: out.copy_(x),
        "add": lambda: torch.add(x, y, out=out),
        "norm": lambda: fn.layer_norm(x, (width,), weight, weight),
        "softmax": lambda: torch.softmax(x, -1),
        "gate": lambda: fn.silu(x).mul_(y),
    }
    return runs[kernel.name]


def _update(kernel: OptimizerKernel, device: torch.device) -> Run:
    value, gradient, mean, square = (
        _drawn((kernel.elements,), torch.float32, device) for _ in range(4)
    )
    square.square_()
    rule, state = AdamW(Optimizer()), ([mean], [square])
    rule.start_update(1)
    operands = FusedOperands(
        targets=[value], gradients=[gradient], state=state, rate=1e-4, weight_decay=0.1
    )
    return lambda: rule.update(operands)


def _dispatch(kernel: LaunchKernel, dtype: torch.dtype, device: torch.device) -> Run:
    x = _drawn((1, _FEW), dtype, device)
    square = _drawn((_FEW, _FEW), dtype, device)
    if kernel.name == "add":
        return lambda: x.add_(1.0)
    if kernel.name == "product":
        return lambda: torch.mm(x, square)
    tracked = x.clone().requires_grad_()
    return lambda: fn.layer_norm(tracked, (_FEW,))


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mean(seconds: float, context: RankContext) -> float:
    """Return the mean of all ranks' seconds."""
    if context.world_size == 1:
        return seconds
    total = torch.tensor([seconds], dtype=torch.float64, device=context.device)
    with context.progress.waits_for("the other ranks"):
        dist.all_reduce(total)
    return float(total) / context.world_size


def _wait_for_all(context: RankContext) -> None:
    """Wait for all ranks, so that they begin together."""
    if context.world_size > 1:
        with context.progress.waits_for("the other ranks"):
            dist.barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveJob:
    """Say what ranks measure: collectives of the first ranks, each for `window_s`.

    The first rank writes each into `journal`.
    """

    collectives: Sequence[Collective]
    window_s: float
    threads: int = 1
    journal: Journal | None = None


def measure_collectives(context: RankContext, job: CollectiveJob) -> list[float]:
    """Return the seconds of each collective, of its slowest rank: the same on every rank.

    Ranks outside of a collective wait for its end.
    """
    torch.set_num_threads(job.threads)
    recorder = Recorder(context.rank, NoEvents(), context.progress)
    shapes = sorted({(one.degree, one.stride) for one in job.collectives})
    groups = {shape: _group(context, *shape, recorder) for shape in shapes}
    found: list[float] = []
    for one in job.collectives:
        context.progress.mark(f"measuring {one}")
        group = groups[one.degree, one.stride]
        seconds = 0.0 if group is None else _measured(group, one, context, job.window_s)
        slowest = torch.tensor([seconds], dtype=torch.float64, device=context.device)
        with context.progress.waits_for("the other ranks"):
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(float(slowest))
        if job.journal is not None and context.rank == 0:
            job.journal.append(measurement_name(one), found[-1])
    return found


def _group(context: RankContext, degree: int, stride: int, recorder: Recorder) -> Group | None:
    """Return this rank's group of `degree` ranks `stride` apart, None where it is in none."""
    own: Group | None = None
    for first in range(stride):
        ranks = [first + stride * place for place in range(degree)]
        made = dist.new_group(ranks)  # All ranks make all groups.
        if context.rank in ranks:
            assert isinstance(made, dist.ProcessGroup), "this rank is a member"
            own = Group("tp", ranks, context.rank, Communicator(ranks, made), recorder)
    return own


def _measured(group: Group, one: Collective, context: RankContext, window_s: float) -> float:
    run = _prepared(group, one, context.device)
    run()
    start = _now(context.device)
    run()
    # All members must run it as often: the first one says how many fill the window.
    once = torch.tensor([_now(context.device) - start], device=context.device)
    group.all_reduce(once, name=NAME)
    mean = max(float(once) / group.size, 1e-7)
    found: list[float] = []
    for _ in range(max(LEAST_RUNS, min(MOST_RUNS, int(window_s / mean)))):
        start = _now(context.device)
        run()
        found.append(_now(context.device) - start)
    # A message goes there and comes back.
    return median(found) / 2 if one.kind == "send" else median(found)


def _prepared(group: Group, one: Collective, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one collective on every member, to its end."""
    piece_numel = max(1, one.num_bytes // (4 * group.size))
    whole = torch.zeros(piece_numel * group.size, device=device)
    piece = torch.zeros(piece_numel, device=device)
    other = torch.empty_like(whole)

    def send() -> None:
        # There and back between neighbours; a rank without one (of an odd number) looks on.
        peer = group.index ^ 1
        if peer >= group.size:
            return
        if group.index < peer:
            group.send(whole, peer, name=NAME, tag=1).wait()
            group.receive(other, peer, name=NAME, tag=2).wait()
        else:
            group.receive(other, peer, name=NAME, tag=1).wait()
            group.send(whole, peer, name=NAME, tag=2).wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(whole, name=NAME),
        "all_gather": lambda: group.all_gather(whole, piece, name=NAME),
        "reduce_scatter": lambda: group.reduce_scatter(piece, whole, name=NAME),
        "all_to_all": lambda: group.all_to_all(other, whole, name=NAME),
        "send": send,
    }
    return calls[one.kind]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
