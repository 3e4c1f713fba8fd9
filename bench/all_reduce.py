"""Time sums and gathers between hosts with slow links, side by side: `python -m bench.all_reduce`.

Ranks are on network namespaces, whose links to one another are shaped and whose inner links are
not. Torch's flat all-reduce, reduce-scatter and all-gather over Gloo and ours take turns in one
run, round after round, so that a busy machine slows all of them; what counts is the ratio of
medians. Beside the all-reduces, torch's model averaging for local SGD averages as many numbers: a
`PeriodicModelAverager` once over all ranks, a `HierarchicalModelAverager` once over all and once in
each host. The kernel counts what each host sends to others: more than 1.03 times the formula is
exit 1, and so is a hierarchy that is not faster than torch's of the same kind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)

import echelon as ec
from bench.harness.host_ranks import ADDRESS, RANK, bytes_out, run_on_hosts
from bench.harness.hosts import Link, can_make_namespaces, linked_hosts
from bench.harness.interleave import end_cleanly
from bench.wire import WIRE_TARGET
from echelon.cost.bytes.all_reduce import SumGroup

TORCH, PAIRS, HIERARCHICAL = "torch", "backend", "hierarchical"
OWN = ("ring", "halving-doubling", HIERARCHICAL)
AVERAGES = ("PeriodicModelAverager", "HierarchicalModelAverager")
CASES: dict[str, tuple[str, ...]] = {
    "all_reduce": (TORCH, *OWN, *AVERAGES),
    "reduce_scatter": (TORCH, PAIRS, *OWN),
    "all_gather": (TORCH, PAIRS, *OWN),
}
"""What is timed of each kind of collective; "backend" are our exchanges between all pairs."""
TIMEOUT_S = 300

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Turn = Callable[[], torch.Tensor]
Found = dict[str, dict[str, list[float]]]


def turns_of(
    kind: str, numbers: torch.Tensor, ranks: int, size: int
) -> dict[str, tuple[Turn, torch.Tensor]]:
    """Return what each case of a kind runs, and what must come out of it."""
    rank, mean = dist.get_rank(), (size + 1) / 2
    total = torch.full_like(numbers, size * mean)
    found: dict[str, tuple[Turn, torch.Tensor]] = {}
    if kind == "all_reduce":

        def flat() -> torch.Tensor:
            copy = numbers.clone()
            dist.all_reduce(copy)
            return copy

        found = {TORCH: (flat, total)}
        for name, turn in averages(numbers, ranks, size).items():
            found[name] = turn, torch.full_like(numbers, mean)
        call, given, right = ec.collectives.all_reduce, numbers, total
    elif kind == "reduce_scatter":

        def flat() -> torch.Tensor:
            piece = numbers.new_empty(len(numbers) // size)
            _reduce_scatter(piece, numbers)
            return piece

        call, given, right = ec.collectives.reduce_scatter, numbers, total[: len(total) // size]
        found = {TORCH: (flat, right)}
    else:
        given = torch.full((len(numbers) // size,), float(rank + 1))
        right = torch.arange(1.0, size + 1).repeat_interleave(len(given))

        def flat() -> torch.Tensor:
            whole = torch.empty_like(right)
            _all_gather(whole, given)
            return whole

        call = ec.collectives.all_gather
        found = {TORCH: (flat, right)}
    for name in (one for one in CASES[kind] if one not in found):
        each = ranks if name == HIERARCHICAL else None
        found[name] = (
            lambda name=name, each=each: call(given, algorithm=name, ranks_per_node=each),
            right,
        )
    return {name: found[name] for name in CASES[kind]}


def averages(numbers: torch.Tensor, ranks: int, size: int) -> dict[str, Turn]:
    """Return the rounds of torch's model averaging, of one parameter."""
    periodic = PeriodicModelAverager(period=2, warmup_steps=0)
    levels = OrderedDict([(1, ranks), (2, size)])
    nested = HierarchicalModelAverager(period_group_size_dict=levels, warmup_steps=0)

    def averaged(averager: PeriodicModelAverager | HierarchicalModelAverager, times: int) -> Turn:
        def turn() -> torch.Tensor:
            model = [torch.nn.Parameter(numbers.clone())]
            model[0].grad = numbers  # what has none is not averaged
            averager.step = 0
            for _ in range(times):
                averager.average_parameters(model)
            return model[0].detach()

        return turn

    return dict(zip(AVERAGES, (averaged(periodic, 1), averaged(nested, 2)), strict=True))


def rank_main(arguments: argparse.Namespace) -> None:
    """Run as one rank: let every case have its turns, and print what rank 0 has measured."""
    size = arguments.hosts * arguments.ranks
    rank, address = int(os.environ[RANK]), os.environ[ADDRESS]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    numbers = torch.full((arguments.elements,), float(rank + 1))
    turns = {
        f"{kind} {name}": one
        for kind in CASES
        for name, one in turns_of(kind, numbers, arguments.ranks, size).items()
    }
    names = list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[int]] = {name: [] for name in names}
    for round_ in range(arguments.rounds + 1):
        first = round_ % len(names)
        for name in (*names[first:], *names[:first]):
            turn, right = turns[name]
            dist.barrier()
            before, start = bytes_out(), time.perf_counter()
            found = turn()
            slowest = torch.tensor([time.perf_counter() - start])
            # The counters of both hosts are read when every rank has all that it waits for.
            dist.barrier()
            leads = rank % arguments.ranks == 0
            far = torch.tensor([bytes_out() - before if leads else 0], dtype=torch.int64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(far)
            if not torch.equal(found, right):
                raise RuntimeError(f"{name}: the numbers are wrong")
            if round_ > 0:  # the first round opens connections
                seconds[name].append(float(slowest))
                sent[name].append(int(far))
    if rank == 0:
        print(json.dumps({"seconds": seconds, "sent": sent}))
    dist.barrier()
    dist.destroy_process_group()


def predicted_far(kind: str, name: str, hosts: int, ranks: int, elements: int) -> int | None:
    """Return the bytes that all hosts send to others, by the formula; None where there is none.

    Torch's all-reduce over Gloo is a ring of all ranks, as `PeriodicModelAverager` has it, too.
    """
    flat = kind == "all_reduce" and name in (TORCH, AVERAGES[0])
    if name not in (PAIRS, *OWN) and not flat:
        return None
    nodes = tuple(place // ranks for place in range(hosts * ranks))
    algorithm = PAIRS if flat else name
    groups = [SumGroup(algorithm=algorithm, place=one, nodes=nodes) for one in range(len(nodes))]
    if kind == "all_reduce":
        return sum(group.bytes_by_tier(elements, 4)[1] for group in groups)
    return sum(group.slice_bytes_by_tier(4 * elements // len(nodes))[1] for group in groups)


def main() -> int:
    """Measure, print a table, and return 1 where bytes or seconds are not what they should be."""
    parser = argparse.ArgumentParser(prog="python -m bench.all_reduce", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--elements", type=int, default=1 << 20, help="float32, of each collective")
    parser.add_argument("--rounds", type=int, default=15, help="in which every case has a turn")
    parser.add_argument("--mbit", type=float, default=200.0, help="what a host sends to others")
    arguments = parser.parse_args()
    size = arguments.hosts * arguments.ranks
    if arguments.hosts < 2 or arguments.ranks < 2 or size & (size - 1) or arguments.elements % size:
        parser.error(f"{size} ranks must be 2 or more on each host, a power of two, and divide")
    if RANK in os.environ:
        rank_main(arguments)
        return 0
    if not can_make_namespaces():
        print("error: hosts of their own need root, `ip` and `tc` (Linux)", file=sys.stderr)
        return 3
    end_cleanly()
    with linked_hosts(arguments.hosts) as hosts:
        for host in hosts:
            host.shape(Link(bits_per_s=arguments.mbit * 1e6))
        found = run_on_hosts(
            "bench.all_reduce", hosts, sys.argv[1:], each=arguments.ranks, timeout_s=TIMEOUT_S
        )
    return report(found, arguments)


def report(found: Found, arguments: argparse.Namespace) -> int:
    """Print what was measured; return 1 where it is not what it should be."""
    hosts, ranks, elements = arguments.hosts, arguments.ranks, arguments.elements
    print(
        f"{hosts} x {ranks} ranks, {4 * elements / 1e6:.1f} MB, {arguments.mbit:.0f} Mbit/s "
        f"between hosts, medians of {arguments.rounds} rounds, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores\n"
    )
    print(
        "| collective | by | ms | least | most | torch's / this | MB between hosts | of formula |"
    )
    print("|---|---|---|---|---|---|---|---|")
    wrong = False
    for kind, names in CASES.items():
        flat = statistics.median(found["seconds"][f"{kind} {TORCH}"])
        for name in names:
            taken = found["seconds"][f"{kind} {name}"]
            far = statistics.median(found["sent"][f"{kind} {name}"])
            median, told = statistics.median(taken), ""
            if (formula := predicted_far(kind, name, hosts, ranks, elements)) is not None:
                told = f"{far / formula:.4f}"
                wrong |= far / formula > WIRE_TARGET
            wrong |= name == HIERARCHICAL and median >= flat
            print(
                f"| {kind} | {name} | {1000 * median:.1f} | {1000 * min(taken):.1f} "
                f"| {1000 * max(taken):.1f} | {flat / median:.2f} | {far / 1e6:.3f} | {told} |"
            )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
