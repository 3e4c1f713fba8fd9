"""Measure pipeline schedules: beside their simulation, beside peers, over links, with a heavy head.

`python -m bench.pipeline --part simulation` runs every schedule on two ranks, feeds the simulator
with the action times that it measured and compares the step; also what splitting backward (zb-h1)
and searching (auto) gain over 1F1B and what was promised. `--part peers` sets each beside torch's
same schedule and the fastest 1F1B of all peers, `--part links` beside torch's across two hosts with
shaped uplinks (root only), `--part balance` automatic stages beside even ones. `--profile` says
where a step's time goes. All cases of a heat take turns. Exit 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench.harness.catalogue import DEFAULT_PEERS
from bench.harness.hosts import Link, can_make_namespaces
from bench.harness.interleave import Options, end_cleanly, read_options
from bench.pipeline.balance import measure_balance
from bench.pipeline.peers import measure_peers
from bench.pipeline.profile import profile
from bench.pipeline.simulation import measure_simulation
from bench.pipeline.spec import PIPELINE_SIZES, STAGES_PER_RANK, chosen_schedules

PARTS = ("simulation", "peers", "links", "balance")
ALL_PEERS = 9


def main() -> int:
    """Measure one part, print tables and verdicts."""
    arguments = _parser().parse_args()
    try:
        names = chosen_schedules(arguments.schedules)
    except ValueError as error:
        sys.exit(f"error: {error}")
    options = _options(arguments)
    if arguments.part == "links" and not can_make_namespaces():
        print("error: shaped links need root, `ip` and `tc` (Linux)", file=sys.stderr)
        return 3
    end_cleanly()
    missed = profile(options, names) if arguments.profile else _measure(arguments, options, names)
    print(
        f"{missed} missed ({options.size.name}, load {os.getloadavg()[0]:.1f};"
        f" logs in {options.logs})"
    )
    return 1 if missed else 0


def _measure(arguments: argparse.Namespace, options: Options, names: tuple[str, ...]) -> int:
    if arguments.part == "simulation":
        return measure_simulation(options, names)
    if arguments.part == "balance":
        return measure_balance(options, arguments.times)
    link = Link(bits_per_s=arguments.mbit * 1e6) if arguments.part == "links" else None
    compared = measure_peers(options, names, link)
    if options.json is not None:
        options.json.write_text(json.dumps(compared.results, indent=1) + "\n")
    return compared.missed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__)
    add = parser.add_argument
    add("--part", choices=PARTS, default="simulation", help="what is measured (%(default)s)")
    add("--profile", action="store_true", help="only say where the time of a step goes")
    add("--schedules", default=",".join(STAGES_PER_RANK), help="comma-separated: %(default)s")
    sizes = "size of the model (default: equal; in part balance: head)"
    add("--size", choices=PIPELINE_SIZES, help=sizes)
    add("--rounds", type=int, default=3, help="turns of every case (default: %(default)s)")
    add("--steps", type=int, default=4, help="timed steps a turn (default: %(default)s)")
    add("--warmup", type=int, default=1, help="untimed steps a turn (default: %(default)s)")
    add("--peers", type=int, default=ALL_PEERS, help="how many run 1F1B (default: all)")
    add("--peers-home", type=Path, default=DEFAULT_PEERS, help="where setup_peers.sh put them")
    add("--mbit", type=float, default=200.0, help="part links: uplink of a host (200)")
    add("--times", type=Path, help="part balance: file of `echelon calibrate RUN`")
    add("--json", type=Path, help="parts peers and links: write every measurement to this file")
    add("--logs", type=Path, help="folder for what ranks write (default: a new one)")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    """Return the options that all commands share; exits where peers are needed and missing."""
    with_peers = arguments.part in ("peers", "links") and not arguments.profile
    size = arguments.size or ("head" if arguments.part == "balance" else "equal")
    known = {**vars(arguments), "modes": "", "size": "spec", "no_echelon": False}
    known["peers"] = arguments.peers if with_peers else 0
    return replace(read_options(argparse.Namespace(**known)), size=PIPELINE_SIZES[size])


if __name__ == "__main__":
    sys.exit(main())
