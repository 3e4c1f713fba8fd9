# SPDX-License-Identifier: Apache-2.0
"""`echelon observe --experts`: which experts the tokens of a step chose, and how unevenly."""

from __future__ import annotations

from pathlib import Path

from echelon.api.observing import observe_experts
from echelon.cli.output import WIDEST, page_columns, print_result
from echelon.core.units import binary_bytes
from echelon.planner.view.text_layout import fit_page, table
from echelon.telemetry.routing import ExpertHotspots, RecordedLoad

_SHOWN = 16
"""Experts that have a column each; of more, those with most and fewest tokens are named."""
_LOAD_FACTS = ("layer", "counts", "imbalance", "busiest", "dropped", "aux_loss", "z_loss")


def show_experts(run: Path, step: int | None, json: bool) -> int:
    """Print where the tokens of a step of a run went."""
    spots = observe_experts(run, step=step)
    print_result(
        "observe",
        lambda: hotspots_json(spots),
        lambda: hotspots_text(spots, columns=page_columns(WIDEST)),
        as_json=json,
    )
    return 0


def hotspots_text(spots: ExpertHotspots, *, columns: int = WIDEST) -> str:
    """Return the tokens of each expert by layer, then what stands out."""
    experts = spots.plan.model.experts
    assert experts is not None, "a run without experts is refused before"
    each = experts.num_experts <= _SHOWN
    loads = range(experts.num_experts) if each else ("most", "fewest")
    header = ("layer", "imbalance", "busiest", *(str(one) for one in loads), "dropped")
    worst, mean = spots.worst, spots.layers[0].mean
    lines = [
        f"step {spots.step} of {spots.run.name}: tokens that chose each expert "
        f"({mean:.0f} where all have as many)",
        "",
        table(header, [_row(load, each=each) for load in spots.layers], columns),
        "",
        f"hottest     expert {worst.busiest} of layer {worst.layer}: {max(worst.counts)} tokens, "
        f"{worst.imbalance:.2f} times the mean",
    ]
    idle = [
        f"{load.layer}.{expert}"
        for load in spots.layers
        for expert, count in enumerate(load.counts)
        if count == 0
    ]
    if idle:
        more = f" and {len(idle) - _SHOWN} more" if len(idle) > _SHOWN else ""
        lines.append(f"idle        layer.expert {', '.join(idle[:_SHOWN])}{more}")
    share = 100 * spots.dropped / max(1, spots.assignments)
    lines.append(f"dropped     {spots.dropped} of {spots.assignments} assignments, {share:.1f} %")
    lines.append(f"received    {_received(spots)}")
    return fit_page("\n".join(lines), columns=columns) + "\n"


def hotspots_json(spots: ExpertHotspots) -> dict[str, object]:
    """Return the same as JSON."""
    return {
        "run": str(spots.run),
        "step": spots.step,
        "layers": [{name: getattr(load, name) for name in _LOAD_FACTS} for load in spots.layers],
        "received_bytes": {str(rank): count for rank, count in spots.received_bytes.items()},
    }


def _row(load: RecordedLoad, *, each: bool) -> tuple[object, ...]:
    counts = load.counts if each else (max(load.counts), min(load.counts))
    return (load.layer, f"{load.imbalance:.2f}", load.busiest, *counts, load.dropped)


def _received(spots: ExpertHotspots) -> str:
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
