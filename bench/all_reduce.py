"""Time all-reduces between hosts with slow links, side by side: `python -m bench.all_reduce`.

Ranks are on network namespaces, whose links to one another are shaped and whose inner links are
not. Torch's flat all-reduce over Gloo and ours take turns in one run, round after round, so that a
busy machine slows all of them; what counts is the ratio of medians. The kernel counts what each
host sends to others: more than 1.03 times the formula is exit 1, and so is a hierarchy that is not
faster than torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import echelon as ec
from bench.harness.host_ranks import ADDRESS, RANK, bytes_out, run_on_hosts
from bench.harness.hosts import Link, can_make_namespaces, linked_hosts
from bench.harness.interleave import end_cleanly
from bench.wire import WIRE_TARGET
from echelon.cost.bytes.all_reduce import SumGroup

ALGORITHMS = ("backend", "ring", "halving-doubling", "hierarchical")
TIMEOUT_S = 300


def rank_main(arguments: argparse.Namespace) -> None:
    """Run as one rank: sum by every algorithm in turn, and print what rank 0 has measured."""
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
    total = torch.full_like(numbers, size * (size + 1) / 2)
    seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    sent: dict[str, list[int]] = {name: [] for name in ALGORITHMS}
    for round_ in range(arguments.rounds + 1):
        turn = round_ % len(ALGORITHMS)
        for name in (*ALGORITHMS[turn:], *ALGORITHMS[:turn]):
            dist.barrier()
            before, start = bytes_out(), time.perf_counter()
            found = _summed(name, numbers, arguments.ranks)
            slowest = torch.tensor([time.perf_counter() - start])
            # The counters of both hosts are read when every rank has all that it waits for.
            dist.barrier()
            leads = rank % arguments.ranks == 0
            far = torch.tensor([bytes_out() - before if leads else 0], dtype=torch.int64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(far)
            if not torch.equal(found, total):
                raise RuntimeError(f"{name}: the sum is wrong")
            if round_ > 0:  # the first round opens connections
                seconds[name].append(float(slowest))
                sent[name].append(int(far))
    if rank == 0:
        print(json.dumps({"seconds": seconds, "sent": sent}))
    dist.barrier()
    dist.destroy_process_group()


def _summed(name: str, numbers: torch.Tensor, ranks_per_node: int) -> torch.Tensor:
    if name == "backend":
        found = numbers.clone()
        dist.all_reduce(found)
        return found
    each = ranks_per_node if name == "hierarchical" else None
    return ec.collectives.all_reduce(numbers, algorithm=name, ranks_per_node=each)


def predicted_far(name: str, hosts: int, ranks: int, elements: int) -> int:
    """Return the bytes that all hosts send to others, by the formula."""
    nodes = tuple(place // ranks for place in range(hosts * ranks))
    places = range(len(nodes))
    groups = (SumGroup(algorithm=name, place=place, nodes=nodes) for place in places)
    return sum(group.bytes_by_tier(elements, 4)[1] for group in groups)


def main() -> int:
    """Measure, print a table, and return 1 where bytes or seconds are not what they should be."""
    parser = argparse.ArgumentParser(prog="python -m bench.all_reduce", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--elements", type=int, default=1 << 20, help="float32, in one all-reduce")
    parser.add_argument(
        "--rounds", type=int, default=15, help="in which every algorithm has a turn"
    )
    parser.add_argument("--mbit", type=float, default=200.0, help="what a host sends to others")
    arguments = parser.parse_args()
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


def report(found: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> int:
    """Print what was measured; return 1 where it is not what it should be."""
    hosts, ranks, elements = arguments.hosts, arguments.ranks, arguments.elements
    size = f"{4 * elements / 1e6:.1f} MB"
    print(f"{hosts} x {ranks} ranks, {size}, {arguments.mbit:.0f} Mbit/s between hosts")
    flat = statistics.median(found["seconds"]["backend"])
    wrong = False
    for name in ALGORITHMS:
        median = statistics.median(found["seconds"][name])
        least, most = min(found["seconds"][name]), max(found["seconds"][name])
        far = statistics.median(found["sent"][name])
        formula = predicted_far(name, hosts, ranks, elements)
        wire = far / formula
        wrong |= wire > WIRE_TARGET or (name == "hierarchical" and median >= flat)
        print(
            f"{name:17} {1000 * median:6.1f} ms ({1000 * least:.1f} to {1000 * most:.1f}), "
            f"{flat / median:.2f} x as fast as flat; between hosts {far / 1e6:.3f} MB, "
            f"{wire:.4f} x the formula"
        )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
