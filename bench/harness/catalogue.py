"""Which frameworks run in which mode, the fastest known first, and in which environment."""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.spec import (
    CONTEXT_MODES,
    MODES,
    MODULE_MODES,
    SINGLE,
    ZERO_BUBBLE_MODES,
    ZERO_MODES,
    Mode,
    Settings,
    Size,
)

OURS = "Echelon"
ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PEERS = ROOT / ".peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one framework in one mode: the module that builds its step, and its interpreter.

    `root` is the tree whose `bench` and `src` its ranks import.
    """

    label: str
    module: str
    variant: str
    mode: Mode
    python: Path
    root: Path = ROOT

    @property
    def slug(self) -> str:
        """Return the label as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    def settings(self, size: Size) -> Settings:
        """Return what a rank of this case must know."""
        return Settings(module=self.module, variant=self.variant, size=size, mode=self.mode)


PEERS = ROOT / "bench" / "data" / "peers.csv"
"""Which frameworks serve a mode, the fastest known first. megatron-core's torch layers refuse
sequence parallelism; its other layers need a GPU."""


def peers(
    mode: Mode, peers_home: Path, *, at_most: int, own_module: bool = False
) -> tuple[Case, ...]:
    """The peers of a mode, the fastest known first; of own modules those that train the same."""
    with PEERS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if mode.name in row["modes"].split()]
    same_module = [row for row in rows if row["trains"]]
    others = [row for row in rows if not row["trains"]]
    python = peers_home / "venv" / "bin" / "python"
    return tuple(
        Case(
            label=row["label"],
            module=f"bench.peers.{row['module']}",
            variant=row["variant"],
            mode=mode,
            python=python,
        )
        for row in ((own_module and same_module) or others)[:at_most]
    )


def ours(mode: Mode) -> Case:
    """Return Echelon with its own model in a mode, in the environment that runs this."""
    return Case(
        label=OURS,
        module="bench.harness.echelon_case",
        variant="",
        mode=mode,
        python=Path(sys.executable),
    )


def own_module(mode: Mode, peers_home: Path) -> Case:
    """Return Echelon with the module that the peers train, in their environment if it is there.

    What `transformers` loads with it counts as memory of a rank: libraries that one environment has
    and the other has not would be in the comparison.
    """
    python = peers_home / "venv" / "bin" / "python"
    case = replace(ours(mode), module="bench.harness.module_case")
    return replace(case, python=python) if python.exists() else case


def single(peers_home: Path) -> Case:
    """Return plain torch in one process with one thread: what limits are computed from."""
    return Case(
        label="plain torch, 1 thread",
        module="bench.peers.plain",
        variant="",
        mode=SINGLE,
        python=peers_home / "venv" / "bin" / "python",
    )


def chosen_modes(names: str) -> tuple[Mode, ...]:
    """The modes of a comma-separated list; ValueError names an unknown one.

    "zero" are all of ZeRO, "module" those that cut a module of one's own.
    """
    known = {**MODES, **ZERO_MODES, **CONTEXT_MODES, **ZERO_BUBBLE_MODES}
    groups = {name: (mode,) for name, mode in known.items()}
    groups |= {"zero": tuple(ZERO_MODES.values()), "module": tuple(MODULE_MODES.values())}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in groups]
    if unknown:
        raise ValueError(f"unknown modes {unknown}; known: {', '.join(groups)}")
    return tuple(mode for name in wanted for mode in groups[name])
