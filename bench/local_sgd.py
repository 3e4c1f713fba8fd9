"""Step rate of local SGD over slow links: `python -m bench.local_sgd`.

Each island, ours and those of torch's model averaging, is one rank on a host of its own: a network
namespace whose uplink is shaped. All cases are alive in the same two processes and take turns; each
turn is as many steps as a round, with the meeting in its middle, so that what comes late travels
inside of it. The baseline of Echelon are its own islands that do not meet in a turn, that of
torch's `PostLocalSGDOptimizer` (with a `PeriodicModelAverager`) is the same loop with a period that
is never over. Told are medians of seconds a step, their ratio to the baseline, and what the kernel
counted beside the formula. Exit 1 where the best of ours is more than 5 % slower than no
communication, or one sends more than 1.03 times the formula. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from bench.harness.host_ranks import ADDRESS, RANK, bytes_out, run_on_hosts
from bench.harness.hosts import Link, can_make_namespaces, linked_hosts
from bench.harness.interleave import end_cleanly
from bench.wire import WIRE_TARGET
from echelon.config.load import load_job
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.cost.bytes.local_sgd import mean_outer_bytes
from echelon.models.operations import Operations
from echelon.parallel.transport.recorder import Recorder
from echelon.proof.oracle.batches import global_batch
from echelon.proof.oracle.oracle import build_decoder, initial_parameters, token_losses
from echelon.training.engine import TrainEngine
from echelon.training.subject import rank_batches

TIMEOUT_S = 900
SLOWER = 1.05
NEVER = 10**6
ALONE, TORCH_ALONE = "no communication", "torch, no communication"
_ISLANDS = 2

Turn = Callable[[int], None]
"""Takes a step, of which the number is given."""


def plan_of(arguments: argparse.Namespace, *sets: str, every: int) -> Plan:
    """Return two islands that meet every so many steps."""
    late = [one for one in sets if one.startswith("local_sgd.delay=")]
    steps = every + int(late[0].partition("=")[2]) if late else every
    base = (
        f"mesh.dp_replicate={_ISLANDS}",
        f"batch.global_sequences={_ISLANDS * arguments.sequences}",
        f"batch.microbatch_sequences={arguments.sequences}",
        f"local_sgd.every={every}",
        f"train.steps={steps}",
        "optimizer.warmup_steps=0",
    )
    return load_job("nano", (*base, *sets)).plan


def plans(arguments: argparse.Namespace) -> dict[str, Plan]:
    """Return what ours runs, by name."""
    every = arguments.every
    late = f"local_sgd.delay={arguments.delay}"
    return {
        ALONE: plan_of(arguments, every=NEVER),
        f"H = {every}": plan_of(arguments, every=every),
        f"H = {every}, int8": plan_of(arguments, "local_sgd.gradients=int8", every=every),
        f"H = {every}, {arguments.delay} steps late": plan_of(arguments, late, every=every),
    }


def ours(plan: Plan, rank: int) -> Turn:
    """Return a step of our engine."""
    engine = TrainEngine(plan, Recorder(rank, NoEvents()), torch.device("cpu"))
    runs = engine.runs_for(plan.mathematics.sequence_length)
    batches = rank_batches(engine.plan, global_batch(plan, 0), engine.data_rank, 0, runs=runs)

    def step(number: int) -> None:
        engine.step(batches, number)

    return step


def torchs(plan: Plan, rank: int, period: int) -> Turn:
    """Return a step of torch's optimizer, which averages models in every so many steps."""
    model = build_decoder(plan, initial_parameters(plan), Operations())
    rows = plan.mathematics.global_sequences // _ISLANDS
    batch = global_batch(plan, 0).rows(slice(rank * rows, (rank + 1) * rows))
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.AdamW(model.parameters(), lr=1e-3),
        averager=PeriodicModelAverager(period=period, warmup_steps=0),
    )
    # Steps are numbered from the middle of a round, as ours are.
    optimizer.averager.step = period // 2

    def step(number: int) -> None:
        optimizer.zero_grad()
        losses = token_losses(plan, model, batch, number)
        (losses.sum() / losses.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def rank_main(arguments: argparse.Namespace) -> None:
    """Run as one rank: let all cases take turns, and print what rank 0 has measured."""
    rank, address = int(os.environ[RANK]), os.environ[ADDRESS]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=rank,
        world_size=_ISLANDS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    torch.set_num_threads(1)
    made = plans(arguments)
    turns: dict[str, Turn] = {name: ours(plan, rank) for name, plan in made.items()}
    if not arguments.without_torch:
        turns[TORCH_ALONE] = torchs(made[ALONE], rank, NEVER)
        turns[f"torch, H = {arguments.every}"] = torchs(made[ALONE], rank, arguments.every)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    sent: dict[str, list[int]] = {name: [] for name in turns}
    for turn in turns.values():
        turn(0)
    # From the middle of a round to the middle of the next one.
    first = arguments.every // 2
    for round_ in range(arguments.rounds):
        names = list(turns)
        at = round_ % len(names)
        for name in (*names[at:], *names[:at]):
            dist.barrier()
            before, start = bytes_out(), time.perf_counter()
            for number in range(first, first + arguments.every):
                turns[name](number + round_ * arguments.every)
            took = torch.tensor([time.perf_counter() - start])
            dist.barrier()
            out = torch.tensor([bytes_out() - before])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            dist.all_reduce(out)
            seconds[name].append(float(took) / arguments.every)
            sent[name].append(int(out) // _ISLANDS)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "sent": sent}))
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> int:
    """Print what was measured; return 1 where it is not what it should be."""
    medians = {name: statistics.median(taken) for name, taken in found["seconds"].items()}
    idle = statistics.median(found["sent"][ALONE])
    planned = {
        name: sum(term.each for term in mean_outer_bytes(plan, 0) if term.axis == "dp_replicate")
        for name, plan in plans(arguments).items()
        if name != ALONE
    }
    load = os.getloadavg()[0]
    print(
        f"{_ISLANDS} islands, {arguments.mbit:g} Mbit/s, {arguments.rounds} rounds of "
        f"{arguments.every} steps, load {load:.1f} on {os.cpu_count()} cores\n"
    )
    print("| case | s a step | least | most | of no communication | MB a round | of formula |")
    print("|---|---|---|---|---|---|---|")
    wires: list[float] = []
    for name, median in medians.items():
        base = medians[TORCH_ALONE if name.startswith("torch") else ALONE]
        taken, out = found["seconds"][name], statistics.median(found["sent"][name])
        wire = ""
        if name in planned:
            wires.append((out - idle) / planned[name])
            wire = f"{wires[-1]:.3f}"
        print(
            f"| {name} | {median:.4f} | {min(taken):.4f} | {max(taken):.4f} | {median / base:.3f} "
            f"| {out / 1e6:.3f} | {wire} |"
        )
    best = min(medians[name] / medians[ALONE] for name in planned)
    met = best <= SLOWER and max(wires) <= WIRE_TARGET
    word = "met" if met else "MISSED"
    print(
        f"\nbest {best:.3f} of no communication (at most {SLOWER}), "
        f"wire {max(wires):.3f} (at most {WIRE_TARGET}): {word}"
    )
    return int(not met)


def main() -> int:
    """Measure, print a table and the verdict."""
    parser = argparse.ArgumentParser(prog="python -m bench.local_sgd", description=__doc__)
    add = parser.add_argument
    add("--every", type=int, default=50, help="steps of a round (default: %(default)s)")
    add("--delay", type=int, default=15, help="of the case that is late (default: %(default)s)")
    add("--mbit", type=float, default=20.0, help="what a host sends to others (%(default)s)")
    add("--sequences", type=int, default=8, help="of an island in a step (default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns of every case (default: %(default)s)")
    add("--without-torch", action="store_true", help="leave torch's averaging out")
    arguments = parser.parse_args()
    if RANK in os.environ:
        rank_main(arguments)
        return 0
    if not can_make_namespaces():
        print("error: hosts of their own need root, `ip` and `tc` (Linux)", file=sys.stderr)
        return 3
    end_cleanly()
    with linked_hosts(_ISLANDS) as hosts:
        for host in hosts:
            host.shape(Link(bits_per_s=arguments.mbit * 1e6))
        found = run_on_hosts("bench.local_sgd", hosts, sys.argv[1:], each=1, timeout_s=TIMEOUT_S)
    return report(found, arguments)


if __name__ == "__main__":
    sys.exit(main())
