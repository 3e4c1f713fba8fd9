"""Every kind of context parallelism is told with its source, and three facts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from echelon.cli.explain.context import KINDS
from echelon.cli.main import main
from echelon.core.choices.context_kinds import CONTEXT_KINDS

pytestmark = pytest.mark.usefixtures("wide")


def page(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what the command prints."""
    assert main(["explain", "context", *flags]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def values(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    return json.loads(page(capsys, *flags, "--json"))["context"]


def test_without_a_run_every_kind_is_told_with_its_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys)
    assert set(CONTEXT_KINDS) == set(KINDS)
    for kind, record in CONTEXT_KINDS.items():
        way = record.facts
        assert f"{kind}: {way.when}\n  splits   {way.splits}\n" in text
    assert max(map(len, text.splitlines())) <= 160
    assert "80 blocks, 64 heads of 128            4 GiB  320 GiB" in text
    assert re.search(
        r"^8    40 GiB  0.5 GiB of each of 80     40 GiB  4 GiB of each of 10", text, re.M
    )
    assert "1.78 GiB on one device" in text
    facts = values(capsys)["facts"]
    missing = {
        mask: facts["pairs"][mask] - facts["pairs_without_a_ring"][mask] for mask in facts["pairs"]
    }
    assert (facts["pairs"], missing) == ({"full": 16, "causal": 10}, {"full": 12, "causal": 6})
    assert facts["resident_chunks"] == {"without_overlap": 2, "overlapped": 3}
    assert facts["errors"]["merged"] < 1e-14 < facts["errors"]["own_keys"]
