"""A file of published production choices -> requests of the planner, pinned to them and free.

Columns: the model is a preset with `settings` over it; the cluster `devices` x a preset; a blank
cell of a layout is something that the source does not say, and that the planner may choose.
`limits` are pins of both plans, for what the trainer of the run had no choice of.

Both plans of a row have the conditions of its run: products in fp8, attention that keeps scores,
and dtypes of states, gradients and the loss where `checked` names a row of the data that says them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.accuracy.published.rows import Row, read_rows
from bench.accuracy.published.trainer_defaults import with_named_settings
from echelon.planner.search.request import SearchAim, SearchRequest, make_request

DATA = Path(__file__).parents[1] / "data"
FILE = DATA / "known_answers.csv"
RUNS = ("measured_runs.csv", "further_runs.csv", "consumer_runs.csv")
"""Files of measured runs that `checked` may name a row of."""
OPENED = ("opened",)
"""What `checked` says where the source itself was read."""
PLAIN = "plain"
"""What `attention` says where scores are kept, as before FlashAttention (May 2022)."""
PINNED = (
    "tp",
    "cp",
    "pp",
    "virtual",
    "ep",
    "zero",
    "microbatch",
    "recompute",
    "schedule",
    "context",
    "dp_replicate",
    "reshard",
    "offload",
)
"""Columns of a layout, called as the pins that they become."""
UNITS = ("step_s", "tokens_s", "tflops", "hw_tflops", "causal_tflops")
"""What a measured rate is: seconds of a step, tokens/s of a device, TFLOP/s of a device.

Those of the hardware count recompute; causal ones count half of the attention."""
GPT_POSITIONS = 2048  # tokens
HARDWARE_PASSES = 4.0 / 3.0
"""FLOPs of a step with full recompute, over those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold one published choice."""

    name: str
    cells: Mapping[str, str]

    @property
    def reason(self) -> str:
        """Return why its authors chose what our formulas would not; "" where nobody knows."""
        return self.cells["reason"]

    @property
    def pins(self) -> tuple[str, ...]:
        """Return its layout as pins; state stays on the device where nobody says more."""
        found = [f"{name}={self.cells[name]}" for name in PINNED if self.cells[name]]
        return (*found,) if self.cells["offload"] else (*found, "offload=none")

    @property
    def measured_run(self) -> Row | None:
        """Return the row of the data that says more of the run; None where the source was read."""
        return None if self.cells["checked"] in OPENED else measured_runs()[self.cells["checked"]]

    def request(self, *pins: str) -> SearchRequest:
        """Return what to search for; ConfigError where the row is wrong."""
        cells = self.cells
        settings = [one for one in cells["settings"].split(";") if one]
        settings.append(f"batch.sequence_length={cells['sequence_length']}")
        settings.append(f"batch.global_sequences={cells['global_batch']}")
        length = int(cells["sequence_length"])
        pinned = {one.partition("=")[0] for one in pins}
        limits = [one for one in cells["limits"].split(";") if one]
        limits = [one for one in limits if one.partition("=")[0] not in pinned]
        if cells["model"].startswith("gpt") and length > GPT_POSITIONS:
            settings.append(f"model.max_positions={length}")
        found = make_request(
            cells["model"],
            cluster=f"{cells['devices']}x{cells['cluster']}",
            settings=settings,
            pins=(*pins, *limits),
            aim=SearchAim(top=1, trainer=cells["trainer"]),
        )
        run, software = self.measured_run, found.software
        if run is not None:
            software = with_named_settings(run, software, found.trainer)
        if cells["attention"] == PLAIN:
            software = replace(software, fused_attention=0.0)
        narrow = "fp8" if cells["precision"] == "fp8" else None
        return replace(found, software=software, matmul_dtype=narrow)

    def measured_s(
        self, tokens: float, model_flops: float, attention_flops: float = 0.0
    ) -> float | None:
        """Return the measured seconds of a step; None if unknown.

        `model_flops` are those of a step, and count all pairs of positions: so many are of these.
        """
        if not self.cells["measured"]:
            return None
        value, unit = float(self.cells["measured"]), self.cells["unit"]
        if unit == "step_s":
            return value
        devices = float(self.cells["devices"])
        if unit == "tokens_s":
            return tokens / devices / value
        if unit == "causal_tflops":
            model_flops -= attention_flops / 2.0
        passes = HARDWARE_PASSES if unit == "hw_tflops" else 1.0
        return passes * model_flops / (devices * value * 1e12)


@cache
def measured_runs() -> Mapping[str, Row]:
    """Return the rows of the data by their ids."""
    return {row.id: row for name in RUNS for row in read_rows(DATA / name)}


def read_answers(path: Path = FILE) -> list[Answer]:
    """Return the rows of a file; ValueError where a name stands twice, or a unit is none."""
    with path.open(encoding="utf-8", newline="") as file:
        found = [Answer(name=cells["name"], cells=cells) for cells in csv.DictReader(file)]
    names = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: more than one row is called {', '.join(twice)}")
    wrong = [one.name for one in found if one.cells["measured"] and one.cells["unit"] not in UNITS]
    if wrong:
        raise ValueError(f"{path}: the unit of {', '.join(wrong)} is none of {', '.join(UNITS)}")
    return found
