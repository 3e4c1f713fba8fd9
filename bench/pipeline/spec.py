"""What the pipeline commands run: sizes, schedules, torch's counterparts, targets.

Standard library only: the controller and the ranks of Echelon and of the peers import this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from bench.harness.spec import SIZES, Mode, Size

NUM_RANKS = 2
NUM_MICROBATCHES = 8

SIMULATION_TARGET = 0.08
"""How far a measured step may lie from the simulated one, as a part of the simulated one."""
GAIN_TARGET = 0.80
"""The part of a promised gain that must be measured."""
SAME_SCHEDULE_TARGET = 0.95
FASTEST_1F1B_TARGET = 1.00

PIPELINE_SIZES: Mapping[str, Size] = MappingProxyType(
    {
        **SIZES,
        # A head of 4 % of a block: stages of as many blocks take equally long.
        "equal": Size(name="equal", hidden=512, ffn=1376, layers=8, vocab=256, sequence=256),
    }
)

STAGES_PER_RANK: Mapping[str, int] = MappingProxyType(
    {
        "naive": 1,
        "gpipe": 1,
        "1f1b": 1,
        "interleaved-1f1b": 2,
        "breadth-first": 2,
        "zb-h1": 1,
        "zb-h2": 1,
        "zb-v": 2,
        "dualpipe": 1,
        "dualpipe-v": 2,
        "auto": 1,
    }
)
"""The schedules, and the stages that each gives to a rank here."""

TORCH_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved-1f1b": "ScheduleInterleaved1F1B",
        "breadth-first": "ScheduleLoopedBFS",
        # With one stage a rank: the ZB1P of the paper's repository, which is ZB-H1.
        "zb-h1": "ScheduleInterleavedZeroBubble",
        "zb-v": "ScheduleZBVZeroBubble",
        "dualpipe-v": "ScheduleDualPipeV",
    }
)
"""The class of `torch.distributed.pipelining` that runs the same schedule."""

V_SHAPED = frozenset({"zb-v", "dualpipe-v"})
NOT_COMPARED = frozenset({"naive"})
"""Shown and simulated, never set beside peers: it has one microbatch in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineVariant:
    """Say how a case splits and orders its work; crosses processes as a `Case.variant`.

    `stages` of () is the even split. `rows` are actions by rank, for "auto". `events` is the
    folder into which every rank writes what it did; "" for none.
    """

    schedule: str
    stages: tuple[tuple[int, ...], ...] = ()
    rows: tuple[str, ...] = ()
    events: str = ""

    def __str__(self) -> str:
        """Return the variant as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> PipelineVariant:
        """Return the variant that `str` wrote."""
        data = json.loads(text)
        stages = tuple(tuple(stage) for stage in data["stages"])
        return cls(**{**data, "stages": stages, "rows": tuple(data["rows"])})

    @property
    def per_rank(self) -> int:
        """Return the stages that a rank runs each microbatch through, without mirrored copies."""
        return STAGES_PER_RANK[self.schedule]


def pipeline_mode(name: str) -> Mode:
    """Return two pipeline ranks and eight microbatches, under the name of a table's rows."""
    return Mode(name=name, pp=NUM_RANKS, microbatches=NUM_MICROBATCHES)


def chosen_schedules(names: str) -> tuple[str, ...]:
    """Return the schedules of a comma-separated list; ValueError names an unknown one."""
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in wanted if name not in STAGES_PER_RANK]
    if unknown:
        raise ValueError(f"unknown schedules {unknown}; known: {', '.join(STAGES_PER_RANK)}")
    return wanted
