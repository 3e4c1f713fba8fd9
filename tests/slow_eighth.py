"""An eighth of the slow tests, by turns: `pytest -m slow --slow-eighth commit`.

Files of tests, in the order of their names, are cut into eight parts of about as many seconds each,
by `slow_seconds.toml`, which `python -m tests.file_seconds results.xml slow_seconds` writes. The
hash of the commit chooses the part. Only the cut depends on the table, so that it may be roughly
right.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.file_seconds import recorded
from tests.workers import file_of

ROOT = Path(__file__).parent.parent
PARTS = 8
UNKNOWN_S = 3.0
"""Seconds of a case whose file is not in the table."""
TOLD = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of this module."""
    group = parser.getgroup("workers")
    group.addoption(
        "--slow-eighth", metavar="1-8|commit", help="one part of the files alone, or the commit's"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the other parts."""
    chosen: str | None = config.getoption("slow_eighth")
    if chosen is None:
        return
    part = part_of_commit(head()) if chosen == "commit" else int(chosen)
    counts = Counter(map(file_of, items))
    table = recorded("slow_seconds")
    seconds = {file: table.get(file, UNKNOWN_S * count) for file, count in counts.items()}
    parts = split(seconds)
    config.hook.pytest_deselected(items=[one for one in items if parts[file_of(one)] != part])
    items[:] = [one for one in items if parts[file_of(one)] == part]
    files = [file for file in seconds if parts[file] == part]
    about = sum(seconds[file] for file in files)
    config.stash[TOLD] = (
        f"slow tests, eighth {part} of {PARTS}: {len(files)} files, {about:.0f} s of one worker, "
        f"from {min(files, default='-')} to {max(files, default='-')}"
    )


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say which part is run."""
    return [told] if (told := config.stash.get(TOLD, "")) else []


def head() -> str:
    """Return the hash of the commit; that of no commit where there is no repository."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


def part_of_commit(commit: str) -> int:
    """Return the part, from 1 on, that is a commit's turn."""
    return int(commit, 16) % PARTS + 1


def split(seconds: Mapping[str, float]) -> dict[str, int]:
    """Return the part, from 1 on, of each file; a file belongs to the part of its middle."""
    total = sum(seconds.values()) or 1.0
    before = 0.0
    parts: dict[str, int] = {}
    for file in sorted(seconds):
        parts[file] = min(PARTS, int(PARTS * (before + seconds[file] / 2) / total) + 1)
        before += seconds[file]
    return parts
