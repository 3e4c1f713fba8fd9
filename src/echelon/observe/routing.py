"""routing.jsonl: how many tokens chose each expert, one layer of one step to a line.

One rank of each pipeline stage writes the layers of its stage, every `observe.log_every` steps, the
first and the last one: rank 0 into routing.jsonl, rank 4 into routing.rank-0004.jsonl. What the
whole model did in every step is in metrics.jsonl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.observe.entries import Entry, read_entries
from echelon.observe.json_lines import JsonLines
from echelon.train.routing import RoutingSummary

if TYPE_CHECKING:
    from echelon.parallel.expert import LayerLoad

_OF_A_RANK = re.compile(r"routing(\.rank-\d{4,})?\.jsonl", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """Say how a layer routed the tokens of a step: those that chose each expert, drops included."""

    layer: int
    counts: tuple[int, ...]
    dropped: int
    aux_loss: float | None
    z_loss: float | None

    @property
    def mean(self) -> float:
        """Return the tokens of an expert where all have as many."""
        return sum(self.counts) / len(self.counts)

    @property
    def imbalance(self) -> float:
        """Return the load of the busiest expert over the mean."""
        return max(self.counts) / self.mean if self.mean else 1.0

    @property
    def busiest(self) -> int:
        """Return the number of the expert with the most tokens."""
        return self.counts.index(max(self.counts))


class RoutingWriter:
    """Write the loads that one rank tells; a rank that has none to tell writes no file."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Open nothing yet."""
        self._path = routing_path(run_dir, rank)
        self._lines: JsonLines | None = None

    def write(self, step: int, loads: Mapping[int, LayerLoad]) -> None:
        """Write the layers of a step."""
        if self._lines is None:
            self._lines = JsonLines(self._path)
        for layer, load in sorted(loads.items()):
            self._lines.add(
                {
                    "step": step,
                    "layer": layer,
                    "counts": list(load.counts),
                    "dropped": load.dropped,
                    "aux_loss": load.aux_loss,
                    "z_loss": load.z_loss,
                }
            )
        self._lines.flush()

    def close(self) -> None:
        """Close the file, where there is one."""
        if self._lines is not None:
            self._lines.close()


def routing_path(run_dir: Path, rank: int) -> Path:
    """Return where a rank writes the loads of its layers."""
    return run_dir / ("routing.jsonl" if rank == 0 else f"routing.rank-{rank:04d}.jsonl")


def routing_entry(routing: RoutingSummary | None) -> dict[str, object]:
    """Return what the entry of a step in metrics.jsonl says of experts; nothing of none."""
    if routing is None:
        return {}
    return {
        "imbalance": routing.imbalance,
        "assignments": routing.assignments,
        "dropped": routing.dropped,
        "aux_loss": routing.aux_loss,
        "z_loss": routing.z_loss,
    }


def read_routing(run_dir: Path) -> dict[int, tuple[RecordedLoad, ...]]:
    """Return the loads of the layers, in order, by step; ConfigError where a line cannot be read.

    A step that a resumed run took again counts once, as it was taken last.
    """
    by_step: dict[int, dict[int, RecordedLoad]] = {}
    for path in sorted(run_dir.glob("routing*.jsonl")):
        if not _OF_A_RANK.fullmatch(path.name):
            continue
        of_rank: dict[int, dict[int, RecordedLoad]] = {}
        for entry in read_entries(path):
            step = entry.whole("step")
            while of_rank and next(reversed(of_rank)) > step:
                of_rank.popitem()
            load = _load_of(entry)
            of_rank.setdefault(step, {})[load.layer] = load
        for step, layers in of_rank.items():
            by_step.setdefault(step, {}).update(layers)
    return {
        step: tuple(layers[layer] for layer in sorted(layers))
        for step, layers in sorted(by_step.items())
    }


def _load_of(entry: Entry) -> RecordedLoad:
    return RecordedLoad(
        layer=entry.whole("layer"),
        counts=entry.whole_numbers("counts"),
        dropped=entry.whole("dropped"),
        aux_loss=entry.number("aux_loss"),
        z_loss=entry.number("z_loss"),
    )
