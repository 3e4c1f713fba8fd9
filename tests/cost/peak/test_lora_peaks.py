"""What a plan with adapters says of the peak of each place is what the rehearsal meets, in 2 %."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from echelon.core.axis import Axis
from echelon.cost.peak.rank_peak import PeakWalk, with_few_microbatches
from echelon.rehearsal.rank import rehearse_rank
from echelon.rehearsal.run import on_nccl
from tests.rehearsal.test_peaks import CASES as LAYOUTS

ALL = ("lora.rank=8",)
SOME = ("lora.rank=8", 'lora.targets=["q", "v"]')
LAST = ("lora.rank=8", 'lora.targets=["down"]')

CASES: dict[str, tuple[str, ...]] = {
    "one rank": ALL,
    "zero 3, never freed": SOME,
    "zero 3, tied": LAST,
    "sequence, zero 3": SOME,
    "sequence, zero 2, bf16": ALL,
    "tensor": LAST,
    "ring": ALL,
    "zb-h1": SOME,
    "dualpipe": ALL,
    "1f1b, sequence, bf16": SOME,
    "recomputed": LAST,
    "operators again": SOME,
    "muon, zero 2": ALL,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_frozen_layers_are_told_in_the_peak(name: str) -> None:
    settings = [*LAYOUTS[name], *CASES[name]]
    plan = with_few_microbatches(on_nccl(load_job("nano", settings).plan))
    walk = PeakWalk(plan)
    for pp in range(plan.mesh.pp):
        rank = plan.mesh.rank({Axis.PP: pp})
        found, told = rehearse_rank(plan, rank), walk.peak(rank)
        assert told.bytes == pytest.approx(found.peak_bytes, rel=0.02), (pp, told.where)
