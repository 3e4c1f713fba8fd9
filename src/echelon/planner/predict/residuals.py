"""How far off runs are that were not fitted: measured / predicted of four in five.

Written by `python -m bench.accuracy.residuals --write LEFT.csv` from runs that the same command
left out of its fits. STEP: the seconds of runs of a known trainer on a known device ("known"), of a
trainer that was left out, of a device that was left out, on one node and on several. HELD: bytes
that are not counted. PAIRS: by how much the ratio of two plans' seconds is off, in logarithms,
where predictions are near and where they are far. `planner/explain/bands.py` reads this.
"""

from __future__ import annotations

from collections.abc import Mapping

Factors = tuple[float, float]

STEP: Mapping[str, Mapping[str, Factors]] = {
    "known": {"node": (0.868, 1.558), "nodes": (0.89, 1.103)},
    "trainer": {"node": (0.858, 1.419), "nodes": (0.879, 1.242)},
    "device": {"node": (0.869, 1.422), "nodes": (0.894, 1.261)},
}
EXPERTS: Factors = (0.949, 1.991)
HELD: Factors = (0.864, 1.198)
PAIRS: Mapping[str, float] = {"near": 0.156, "far": 0.244}
RUNS: Mapping[str, int] = {"known": 305, "trainer": 729, "device": 729, "experts": 10, "held": 109}
MOST_DEVICES = 6144  # devices
