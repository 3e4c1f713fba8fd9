"""A module that rank 1 never finishes to import."""

from __future__ import annotations

import os
import time
from typing import Any

if os.environ.get("RANK") == "1":
    time.sleep(1000)


def target(context: Any, argument: Any) -> None:
    """Do nothing."""
