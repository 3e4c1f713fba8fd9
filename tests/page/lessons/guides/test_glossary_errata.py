"""Every claim of the guides that is wrong stands on the page with what holds."""

from __future__ import annotations

import pytest

from echelon.handbook.errata.claims import all_claims
from echelon.page.lessons.corrections import correction_of
from echelon.page.lessons.guides.glossary import VERDICTS, errata


@pytest.mark.system("S60")
def test_every_wrong_claim_is_there_once_with_its_correction() -> None:
    lesson = errata()
    rows = [row for scene in lesson.scenes if scene.table for row in scene.table.rows]
    told = {row[0]: row for row in rows}
    assert len(told) == len(rows)
    wanted = [claim for claim in all_claims() if claim.verdict != "ok"]
    assert set(told) == {claim.id for claim in wanted}
    for claim in wanted:
        correction = correction_of(claim)
        assert told[claim.id] == (claim.id, claim.where, correction.said, correction.holds)
        assert correction.said
        assert correction.holds
    assert sum(claim.verdict == "wrong" for claim in wanted) > 40


def test_a_caption_counts_what_its_table_has() -> None:
    lesson = errata()
    for verdict in VERDICTS:
        for guide in lesson.controls[1].values:
            scene = lesson.scene(verdict=verdict, guide=guide)
            assert scene.table is not None
            assert f"{len(scene.table.rows)} of " in scene.frames[0].caption
