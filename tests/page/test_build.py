"""The page in the package is what its source builds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"
PLACED = WEB.parent / "src" / "echelon" / "page" / "page.html"


@pytest.mark.timeout(300)
def test_the_page_is_built_from_its_source(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None or not (WEB / "node_modules").is_dir():
        if os.environ.get("ECHELON_WEB") == "required":
            pytest.fail("npm or web/node_modules is missing: make web")
        pytest.skip("no npm, or web/node_modules is not installed: make web")
    # A copy is built, so that a test that fails leaves the package as it was.
    copy = tmp_path / "project" / "web"
    shutil.copytree(WEB, copy, ignore=shutil.ignore_patterns("node_modules", "build"))
    (copy / "node_modules").symlink_to(WEB / "node_modules")
    there = tmp_path / "project" / "src" / "echelon" / "page"
    there.mkdir(parents=True)
    before = (copy / "src" / "document.ts").read_text(encoding="utf-8")
    for script in ("types", "build"):
        done = subprocess.run(
            [npm, "run", "--silent", script], cwd=copy, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (copy / "src" / "document.ts").read_text(encoding="utf-8") == before
    built = (there / "page.html").read_text(encoding="utf-8")
    assert built == PLACED.read_text(encoding="utf-8"), "make web"
