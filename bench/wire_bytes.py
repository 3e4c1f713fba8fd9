"""Count what steps send from host to host, beside the formulas: `python -m bench.wire_bytes`.

Hosts are network namespaces. Each system takes few steps, and then more of them, from the start:
the difference is that of the steps alone, without what opens connections, broadcasts seeds and says
goodbye. What is counted is what the interfaces of all hosts have sent, headers and acknowledgements
of TCP/IP included; beside it stands what the formulas say that ranks send to other hosts, of which
the recorded bytes of every rank must be equal to the sum. Exit 1 where more than 1.03 times the
formula was counted. Needs root and `ip`. Nothing is timed: a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from bench.harness.host_ranks import RANK, bytes_out, run_on_hosts
from bench.harness.hosts import can_make_namespaces, linked_hosts
from bench.harness.interleave import end_cleanly
from bench.harness.node_plans import (
    HOSTS,
    TIMEOUT_S,
    HostedPlan,
    islands,
    join_hosts,
    planned_by_axis,
    planned_far,
    served_plan,
    zero_plans,
)
from bench.wire import WIRE_TARGET
from echelon.core.plan import Plan
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.launch.context import RankContext, RankProgress
from echelon.proof.oracle.batches import global_batch
from echelon.training.subject import build_as_trained

SEEN_AGAIN = 4
"""Global batches, which come again and again."""


def systems(settings: Sequence[str] = ()) -> dict[str, HostedPlan]:
    """Return what is counted, by name."""
    found = [
        HostedPlan(name=name, plan=plan, each=2) for name, plan in zero_plans(2, settings).items()
    ]
    updates = ("servers.updates=asynchronous", "servers.max_staleness=2")
    found += [
        HostedPlan(name="parameter servers", plan=served_plan(*settings), each=2),
        HostedPlan(
            name="parameter servers, asynchronous", plan=served_plan(*updates, *settings), each=2
        ),
        HostedPlan(name="local SGD", plan=islands(*settings), each=1),
        HostedPlan(
            name="local SGD, int8",
            plan=islands("local_sgd.gradients=int8", *settings),
            each=1,
        ),
    ]
    return {one.name: one for one in found}


def rank_main(chosen: Sequence[HostedPlan], each: int) -> None:
    """Run as one rank: count each system, and print what rank 0 knows of all hosts."""
    rank = join_hosts(HOSTS * each)
    found: dict[str, list[int]] = {}
    for one in chosen:
        few, many = (
            _counted(one.plan, rank, steps) for steps in (one.warmup, one.warmup + one.steps)
        )
        found[one.name] = [many - few, planned_far(one.plan, counted_steps(one))]
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def counted_steps(one: HostedPlan) -> range:
    """Return the steps of which the bytes are told."""
    return range(one.warmup, one.warmup + one.steps)


def _counted(plan: Plan, rank: int, steps: int) -> int:
    """Return what all hosts send while their ranks take so many steps, from the start."""
    context = RankContext(
        rank=rank,
        world_size=plan.mesh.world_size,
        device=torch.device("cpu"),
        store=dist.distributed_c10d._get_default_store(),
        progress=RankProgress(),
    )
    dist.barrier()
    before, recorded, planned = bytes_out(), Counter[str](), Counter[str]()
    subject = build_as_trained(context, plan)
    for step in range(steps):
        recorded.update(subject.step(global_batch(plan, step % SEEN_AGAIN), step).bytes_sent)
        planned.update(planned_by_axis(plan, rank, step))
    recorded.update(subject.close())
    dist.barrier()
    # One rank speaks for its host.
    leads = rank % plan.cluster.devices_per_node == 0
    out = torch.tensor([bytes_out() - before if leads else 0], dtype=torch.int64)
    dist.all_reduce(out)
    _require_planned(recorded, planned, rank)
    return int(out)


def _require_planned(recorded: Mapping[str, int], planned: Mapping[str, int], rank: int) -> None:
    """Raise where a rank has not sent what the formulas say: of servers to the last goodbye."""
    axes = {axis for axis in (*recorded, *planned) if axis != SERVERS_AXIS}
    wrong = {axis for axis in axes if recorded.get(axis, 0) != planned.get(axis, 0)}
    if wrong:
        told = {axis: (recorded.get(axis, 0), planned.get(axis, 0)) for axis in wrong}
        raise RuntimeError(f"rank {rank} has sent other bytes than the formulas say: {told}")


def table(found: Mapping[str, Sequence[int]], chosen: Mapping[str, HostedPlan]) -> str:
    """Return what was counted as a table in Markdown."""
    lines = ["| system | steps | formula, bytes | counted, bytes | ratio |", "|---" * 5 + "|"]
    for name, (counted, formula) in found.items():
        ratio = f"{counted / formula:.4f}"
        lines.append(f"| {name} | {chosen[name].steps} | {formula:,} | {counted:,} | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    """Count, print the table, and return 1 where a system sends too much."""
    parser = argparse.ArgumentParser(prog="python -m bench.wire_bytes", description=__doc__)
    parser.add_argument("--only", default="", help="systems whose names have this in them")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    every = systems(arguments.settings)
    chosen = {name: one for name, one in every.items() if arguments.only in name}
    if RANK in os.environ:
        alike = [one for one in chosen.values() if one.each == arguments.ranks]
        rank_main(alike, arguments.ranks)
        return 0
    if not can_make_namespaces():
        print("error: hosts of their own need root and `ip` (Linux)", file=sys.stderr)
        return 3
    end_cleanly()
    found: dict[str, list[int]] = {}
    for each in sorted({one.each for one in chosen.values()}, reverse=True):
        words = [*sys.argv[1:], "--ranks", str(each)]
        with linked_hosts(HOSTS) as hosts:
            found |= run_on_hosts("bench.wire_bytes", hosts, words, each=each, timeout_s=TIMEOUT_S)
    print(table(found, chosen))
    worst = max(counted / formula for counted, formula in found.values())
    word = "met" if worst <= WIRE_TARGET else "MISSED"
    print(f"\nworst {worst:.4f}, at most {WIRE_TARGET:.2f}: {word}")
    return int(worst > WIRE_TARGET)


if __name__ == "__main__":
    sys.exit(main())
