"""ZeRO 3 beside each part of ZeRO++, over slow links: `python -m bench.zero_plus_plus`.

Two nodes are network namespaces with shaped links between them and free ones inside. All cases are
alive in the same processes and take turns, round after round, so that a busy machine slows all of
them; what counts is the ratio of medians to ZeRO 3 as it is. The kernel counts what each node sends
to the other: more than 1.03 times the formula is exit 1, and so is a case that crosses nodes with
fewer bytes and is not faster. Secondary slices must have the losses of ZeRO 3 bit for bit. Needs
root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from bench.harness.host_ranks import RANK, bytes_out, run_on_hosts
from bench.harness.hosts import Link, can_make_namespaces, linked_hosts
from bench.harness.interleave import end_cleanly
from bench.harness.node_plans import HOSTS, TIMEOUT_S, join_hosts, planned_far, zero_plans
from bench.wire import WIRE_TARGET
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.oracle.batches import global_batch
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches

PLAIN = "ZeRO 3"
SAME_BITS = "secondary slices (hpZ)"
"""What must have the losses of `PLAIN`."""

Step = Callable[[int], float]
"""Takes a step, of which the number is given, and returns its loss."""


def plans(arguments: argparse.Namespace) -> dict[str, Plan]:
    """Return the cases by name."""
    return zero_plans(arguments.ranks, arguments.settings)


def stepper(plan: Plan, rank: int) -> Step:
    """Return a step of our engine on the same samples again and again."""
    engine = TrainEngine(plan, Recorder(rank, NoEvents()), torch.device("cpu"))
    runs = engine.runs_for(plan.mathematics.sequence_length)
    batches = rank_batches(engine.plan, global_batch(plan, 0), engine.data_rank, 0, runs=runs)
    return lambda number: engine.step(batches, number).loss


def rank_main(arguments: argparse.Namespace) -> None:
    """Run as one rank: let all cases take turns, and print what rank 0 has measured."""
    rank = join_hosts(HOSTS * arguments.ranks)
    turns = {name: stepper(plan, rank) for name, plan in plans(arguments).items()}
    found = measured(turns, rounds=arguments.rounds, steps=arguments.steps, ranks=arguments.ranks)
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(
    turns: Mapping[str, Step],
    *,
    rounds: int,
    steps: int,
    ranks: int,
    sent: Callable[[], int] = bytes_out,
) -> dict[str, dict[str, list[float]]]:
    """Return of each case, turn by turn, seconds and far bytes of a step, and the last loss.

    `sent` says what this node has sent to others so far; one of its `ranks` speaks for it.
    """
    leads = dist.get_rank() % ranks == 0
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "sent": [], "losses": []} for name in turns
    }
    for round_ in range(rounds + 1):
        names = list(turns)
        at = round_ % len(names)
        for name in (*names[at:], *names[:at]):
            dist.barrier()
            before, start = sent(), time.perf_counter()
            loss = 0.0
            for step in range(steps):
                loss = turns[name](round_ * steps + step)
            took = torch.tensor([time.perf_counter() - start])
            dist.barrier()
            far = torch.tensor([sent() - before if leads else 0], dtype=torch.int64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            dist.all_reduce(far)
            if round_ > 0:  # the first round opens connections
                found[name]["seconds"].append(float(took) / steps)
                found[name]["sent"].append(int(far) / steps)
                found[name]["losses"].append(loss)
    return found


def report(
    found: Mapping[str, Mapping[str, list[float]]], formulas: Mapping[str, int]
) -> tuple[str, bool]:
    """Return the table, and whether all is what it should be; `formulas` are bytes of a step."""
    flat = statistics.median(found[PLAIN]["seconds"])
    lines = [
        "| case | s a step | least | most | times as fast | MB between nodes | of formula | loss |",
        "|---" * 8 + "|",
    ]
    met = found[PLAIN]["losses"] == found[SAME_BITS]["losses"]
    for name, one in found.items():
        median, out = statistics.median(one["seconds"]), statistics.median(one["sent"])
        wire = out / formulas[name]
        faster = flat / median
        met &= wire <= WIRE_TARGET and (name == PLAIN or faster > 1.0)
        lines.append(
            f"| {name} | {median:.3f} | {min(one['seconds']):.3f} | {max(one['seconds']):.3f} | "
            f"{faster:.2f} | {out / 1e6:.3f} | {wire:.4f} | {one['losses'][-1]:.6f} |"
        )
    return "\n".join(lines), met


def main() -> int:
    """Measure, print a table and the verdict."""
    parser = argparse.ArgumentParser(prog="python -m bench.zero_plus_plus", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="of each of two nodes (default: %(default)s)")
    add("--mbit", type=float, default=100.0, help="what a node sends to the other (%(default)s)")
    add("--rounds", type=int, default=5, help="in which every case has a turn (%(default)s)")
    add("--steps", type=int, default=2, help="of a turn (default: %(default)s)")
    add("--set", dest="settings", action="append", default=[], help="KEY=VALUE of the model")
    arguments = parser.parse_args()
    if RANK in os.environ:
        rank_main(arguments)
        return 0
    if not can_make_namespaces():
        print("error: nodes of their own need root, `ip` and `tc` (Linux)", file=sys.stderr)
        return 3
    end_cleanly()
    with linked_hosts(HOSTS) as hosts:
        for host in hosts:
            host.shape(Link(bits_per_s=arguments.mbit * 1e6))
        found = run_on_hosts(
            "bench.zero_plus_plus",
            hosts,
            sys.argv[1:],
            each=arguments.ranks,
            timeout_s=TIMEOUT_S,
        )
    formulas = {name: planned_far(plan, range(1)) for name, plan in plans(arguments).items()}
    text, met = report(found, formulas)
    print(
        f"{HOSTS} x {arguments.ranks} ranks, {arguments.mbit:g} Mbit/s between nodes, "
        f"{arguments.rounds} rounds of {arguments.steps} steps, load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores\n\n{text}\n\nwire at most {WIRE_TARGET}, all faster than {PLAIN}, "
        f"{SAME_BITS} with its losses: {'met' if met else 'MISSED'}"
    )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
