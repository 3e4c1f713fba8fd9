"""`echelon observe --experts`: which experts a step chose, and where tokens piled up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from echelon.cli.output import print_json, table

if TYPE_CHECKING:
    from echelon.observe.hotspots import HotSpots
    from echelon.observe.routing import RecordedLoad

_SHOWN = 16
"""Experts that have a column each; of more, those with most and fewest tokens are named."""


def show_experts(run: Path, step: int | None, json: bool) -> int:
    """Print where the tokens of a step of a run went."""
    from echelon.observe.hotspots import read_hotspots

    spots = read_hotspots(run, step=step)
    if json:
        print_json("observe", hotspots_json(spots))
    else:
        print(hotspots_text(spots), end="")
    return 0


def hotspots_text(spots: HotSpots) -> str:
    """Return the tokens of each expert by layer, then what stands out."""
    experts = spots.plan.model.experts
    assert experts is not None, "a run without experts is refused before"
    each = experts.num_experts <= _SHOWN
    columns = range(experts.num_experts) if each else ("most", "fewest")
    header = ("layer", "imbalance", "busiest", *(str(one) for one in columns), "dropped")
    worst, mean = spots.worst, spots.layers[0].mean
    lines = [
        f"step {spots.step} of {spots.run.name}: tokens that chose each expert "
        f"({mean:.0f} where all have as many)",
        "",
        table(header, [_row(load, each=each) for load in spots.layers]),
        "",
        f"hottest     expert {worst.busiest} of layer {worst.layer}: {max(worst.counts)} tokens, "
        f"{worst.imbalance:.2f} times the mean",
    ]
    idle = [f"{load.layer}.{e}" for load in spots.layers for e in _idle(load)]
    if idle:
        more = f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else ""
        lines.append(f"idle        layer.expert {', '.join(idle[:_SHOWN])}{more}")
    share = 100 * spots.dropped / max(1, spots.assignments)
    lines.append(f"dropped     {spots.dropped} of {spots.assignments} assignments, {share:.1f} %")
    lines.append(f"received    {_received(spots)}")
    return "\n".join(lines) + "\n"


def hotspots_json(spots: HotSpots) -> dict[str, object]:
    """Return the same as JSON."""
    return {
        "run": str(spots.run),
        "step": spots.step,
        "layers": [
            {
                "layer": load.layer,
                "counts": list(load.counts),
                "imbalance": load.imbalance,
                "busiest": load.busiest,
                "dropped": load.dropped,
                "aux_loss": load.aux_loss,
                "z_loss": load.z_loss,
            }
            for load in spots.layers
        ],
        "received_bytes": {str(rank): count for rank, count in spots.received_bytes.items()},
    }


def _row(load: RecordedLoad, *, each: bool) -> tuple[object, ...]:
    counts = load.counts if each else (max(load.counts), min(load.counts))
    return (load.layer, f"{load.imbalance:.2f}", load.busiest, *counts, load.dropped)


def _idle(load: RecordedLoad) -> list[int]:
    return [expert for expert, count in enumerate(load.counts) if count == 0]


def _received(spots: HotSpots) -> str:
    from echelon.core.units import binary_bytes

    if spots.plan.mesh.ep == 1:
        return "nothing: every rank has all experts"
    if not spots.received_bytes:
        return "not known: the run has no events of this step"
    by_rank = spots.received_bytes
    rank, most = max(by_rank.items(), key=lambda item: item[1])
    mean = sum(by_rank.values()) / len(by_rank)
    return (
        f"{binary_bytes(most)} at most at once, by rank {rank} "
        f"(one microbatch of one layer; the mean of ranks is {binary_bytes(round(mean))})"
    )
