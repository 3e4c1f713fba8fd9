# SPDX-License-Identifier: Apache-2.0
"""`echelon explore`: a page with controls, in which memory and seconds of a plan follow at once.

Exit codes: 0 the page is written; 2 wrong input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.cli.stderr import note
from echelon.cli.written_files import PAGE, WrittenFiles


def explore(
    *,
    out: Annotated[
        Path, Parameter(help="The file to write the page to, FILE.html, which must be new.")
    ],
    model: Annotated[str, Parameter(help="The preset of a model at which controls start.")] = (
        "llama3-8b"
    ),
    cluster: Annotated[
        str, Parameter(help="Where they start: COUNTxDEVICE such as 8xh100.")
    ] = "64xh100",
) -> int:
    """Write a page whose controls are model, cluster, mesh, ZeRO, schedule, batch and recompute."""
    WrittenFiles.read((str(out),), (PAGE,))
    from echelon.api.reporting import explore as write

    write(out, model=model, cluster=cluster)
    note(f"written: {out}")
    return 0
