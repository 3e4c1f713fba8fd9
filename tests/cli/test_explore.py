"""`echelon explore` writes a page with its tables, and nothing over another file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from echelon.cli.main import main


@pytest.mark.slow
def test_the_page_has_models_clusters_and_where_its_controls_start(tmp_path: Path) -> None:
    path = tmp_path / "explorer.html"
    assert (
        main(["explore", "--model", "mixtral-8x7b", "--cluster", "32xh200", "--out", str(path)])
        == 0
    )
    text = path.read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" id="echelon-data">(.*?)</script>', text)
    document = json.loads(found[0])
    assert document["start"]["model"] == "mixtral-8x7b"
    assert document["start"]["cluster"] == "32xh200"
    names = {one["name"] for one in document["tables"]["clusters"]}
    assert {"32xh200", "16384xh100", "laptop"} <= names
    assert len(text.encode()) - len(found[0].encode()) < 500_000


def test_what_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "explorer.html"
    path.write_text("mine", encoding="utf-8")
    assert main(["explore", "--out", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == "mine"
    assert main(["explore", "--out", str(tmp_path / "explorer.txt")]) == 2
    assert "--out" in capsys.readouterr().err
