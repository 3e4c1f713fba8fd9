"""An asynchronous worker counts the tokens of a global batch by itself."""

from __future__ import annotations

import pytest

from echelon.training.servers.worker import _not_told


def test_a_worker_that_nobody_tells_the_tokens_is_a_bug_of_ours() -> None:
    """S07: the trainer and the proof both say them; no message does."""
    with pytest.raises(AssertionError, match="how many tokens step 3"):
        _not_told(3)
