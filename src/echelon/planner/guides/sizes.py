"""The size guide: ranges of parameters and devices, and the strategy that goes with each.

From guide 003, section 10. Its rows are ranges whose corners do not all fit (003-66 to 003-68), so
a row is always shown with the split that it comes to on the reader's cluster, and what that holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.planner.guides.situation import Situation
from echelon.planner.guides.strategy import ANY, FREE, SEVERAL, Degrees, Strategy

LONG = 131_072
"""Positions from which guide 003 calls a sequence long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """Hold one row: parameters in 1e9 and devices that it is for, its advice, and its weak corner.

    `positions` are the least, and `experts` whether it is for mixtures of experts only.
    """

    id: str
    parameters: tuple[float, float]
    devices: Degrees
    strategy: Strategy
    corner: str
    positions: int = 1
    experts: bool = False

    def covers(self, situation: Situation) -> bool:
        """Return whether a situation is inside of the ranges of the row."""
        least, most = self.parameters
        return (
            least <= situation.num_parameters / 1e9 <= most
            and situation.num_devices in self.devices
            and situation.positions >= self.positions
            and (not self.experts or situation.model.experts is not None)
        )


SIZES = (
    SizeRow(
        id="size-1b-7b",
        parameters=(1, 7.5),
        devices=Degrees(1, 8),
        strategy=Strategy(name="ZeRO 2 or 3", zero=(2, 3)),
        corner="7B on one device: ZeRO cuts nothing at N = 1 (112 GB; 003-66)",
    ),
    SizeRow(
        id="size-7b-70b",
        parameters=(7, 72),
        devices=Degrees(8, 64),
        strategy=Strategy(name="ZeRO 3 + TP 2 to 4", zero=(3,), tp=Degrees(2, 4)),
        corner="70B on 8 devices: 140 GB each (003-67)",
    ),
    SizeRow(
        id="size-70b-500b",
        parameters=(70, 500),
        devices=Degrees(64, 512),
        strategy=Strategy(name="TP 8 + PP 4 to 8 + DP", tp=Degrees(8, 8), pp=Degrees(4, 8)),
        corner="500B with TP 8, PP 8: 125 GB without ZeRO 1, 43 GB with it at N = 8 (003-68)",
    ),
    SizeRow(
        id="size-500b-experts",
        parameters=(500, 1e6),
        devices=Degrees(512, ANY),
        strategy=Strategy(name="TP + PP + DP + EP", tp=FREE, pp=SEVERAL, ep=SEVERAL),
        corner="its example has TP 16; DeepSeek-V3 was trained without TP, EP 64, PP 16 (003-69)",
        experts=True,
    ),
    SizeRow(
        id="size-long-context",
        parameters=(0, 1e6),
        devices=Degrees(2, ANY),
        strategy=Strategy(name="add CP", zero=(0, 1, 2, 3), tp=FREE, pp=FREE, cp=SEVERAL, ep=FREE),
        corner="says nothing of how keys meet queries: echelon explain context",
        positions=LONG,
    ),
)
"""The upper ends are a little above the round numbers: a "7B" has 6.7 to 7.5e9, a "70B" 70.6e9."""


def rows_for(situation: Situation) -> tuple[SizeRow, ...]:
    """Return the rows whose ranges a situation is in."""
    return tuple(row for row in SIZES if row.covers(situation))
