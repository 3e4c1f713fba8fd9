"""`ec.explore` refuses what it does not know before it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.api.reporting import explore
from echelon.core.errors import ConfigError


def test_nothing_is_written_for_a_model_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "explorer.html"
    with pytest.raises(ConfigError):
        explore(path, model="llama3-9b")
    assert not path.exists()
