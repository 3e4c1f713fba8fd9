"""Measure pipeline schedules: beside their simulation, beside peers, over slow links.

`python -m bench pipeline --part simulation` runs every schedule on two ranks, feeds the simulator
with the action times that it measured and compares the step; also what splitting backward (zb-h1)
and searching (auto) gain over 1F1B and what was promised. `--part peers` sets each beside torch's
same schedule and the fastest 1F1B of all peers, `--part links` beside torch's across two hosts with
shaped uplinks (root only). All cases of a heat take turns. Exit 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench.harness.catalogue import DEFAULT_PEERS
from bench.harness.hosts import Link, require_root
from bench.harness.interleave import Options, add_turns, read_options
from bench.pipeline.peers import measure_peers
from bench.pipeline.simulation import measure_simulation
from bench.pipeline.spec import PIPELINE_SIZES, STAGES_PER_RANK, chosen_schedules

PARTS = ("simulation", "peers", "links")
ALL_PEERS = 9


def main() -> int:
    """Measure one part, print tables and verdicts."""
    arguments = _parser().parse_args()
    try:
        names = chosen_schedules(arguments.schedules)
    except ValueError as error:
        sys.exit(f"error: {error}")
    options = _options(arguments)
    if arguments.part == "simulation":
        missed = measure_simulation(options, names)
    else:
        link = Link(bits_per_s=arguments.mbit * 1e6) if arguments.part == "links" else None
        compared = measure_peers(options, names, link)
        missed = compared.missed
        if options.json is not None:
            options.json.write_text(json.dumps(compared.results, indent=1) + "\n")
    print(
        f"{missed} missed ({options.size.name}, load {os.getloadavg()[0]:.1f};"
        f" logs in {options.logs})"
    )
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench pipeline", description=__doc__)
    add = parser.add_argument
    add("--part", choices=PARTS, default="simulation", help="what is measured (%(default)s)")
    add("--schedules", default=",".join(STAGES_PER_RANK), help="comma-separated: %(default)s")
    add("--size", choices=PIPELINE_SIZES, default="equal", help="of the model (%(default)s)")
    add_turns(parser, steps=4)
    add("--warmup", type=int, default=1, help="untimed steps a turn (default: %(default)s)")
    add("--peers", type=int, default=ALL_PEERS, help="how many run 1F1B (default: all)")
    add("--peers-home", type=Path, default=DEFAULT_PEERS, help="where setup_peers.sh put them")
    add("--mbit", type=float, default=200.0, help="part links: uplink of a host (200)")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    """The options that all commands share; exits where peers, or links, are needed and missing."""
    if arguments.part == "links":
        require_root("shaped links")
    known = {**vars(arguments), "modes": "", "size": "spec", "no_echelon": False}
    known |= {"peers": arguments.peers * (arguments.part != "simulation"), "own_module": False}
    return replace(read_options(argparse.Namespace(**known)), size=PIPELINE_SIZES[arguments.size])


if __name__ == "__main__":
    sys.exit(main())
