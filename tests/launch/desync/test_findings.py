"""What a verdict says of itself."""

from __future__ import annotations

import pytest

from echelon.launch.desync.findings import Finding, Verdict


@pytest.mark.parametrize("finding", list(Finding))
def test_only_what_no_time_would_mend_is_certain(finding: Finding) -> None:
    verdict = Verdict(finding=finding, odd=(1,), others=(0,), its=None, theirs=None)
    assert verdict.certain == (finding not in (Finding.LATE, Finding.LINK, Finding.UNKNOWN))


def test_somebody_must_agree_for_a_rank_to_be_judged() -> None:
    pair = Verdict(finding=Finding.APART, odd=(0, 1), others=(), its=None, theirs=None)
    assert not pair.judged
    assert Verdict(finding=Finding.LATE, odd=(0,), others=(1,), its=None, theirs=None).judged
