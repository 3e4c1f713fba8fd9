"""The flags that several commands share, with one wording each."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

RunFile = Annotated[str, Parameter(help="A run.toml, or the name of a preset such as nano.")]
"""What to run: a file or a preset."""

Settings = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        negative=(),
        show_default=False,
        help="Set table.key=value over what the file says; repeat for more.",
    ),
]
"""Any setting of run.toml."""

Json = Annotated[
    bool,
    Parameter(
        name="--json",
        negative=(),
        show_default=False,
        help="Print one versioned JSON object instead of text.",
    ),
]
"""The form of the result."""
