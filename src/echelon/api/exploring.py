# SPDX-License-Identifier: Apache-2.0
"""`ec.explore`: write the page in which a plan follows its controls."""

from __future__ import annotations

from pathlib import Path

from echelon.page.explorer.document import CLUSTER, MODEL, explorer_page
from echelon.page.html import write_page


def explore(html: str | Path, *, model: str = MODEL, cluster: str = CLUSTER) -> Path:
    """Write the explorer to a new file that opens without a network, and return its path.

    `model` is a preset of a model, `cluster` COUNTxDEVICE; the controls start there, at a plan
    that breaks no rule. ConfigError where one is not known, or the file is there.
    """
    path = Path(html)
    write_page(explorer_page(model, cluster), path)
    return path
