# SPDX-License-Identifier: Apache-2.0
"""Loggers of the package: notes about a run, and the progress of long work.

The command line prints both on stderr, where `-q` silences them; a program that imports the package
configures them as any other logger:

    logging.getLogger("echelon").setLevel(logging.ERROR)            # no notes
    logging.getLogger("echelon.progress").setLevel(logging.INFO)    # "120 of 512 meshes"
"""

from __future__ import annotations

import logging

NOTES = logging.getLogger("echelon")
PROGRESS = logging.getLogger("echelon.progress")
"""Long work logs how far it is, as often as it likes; the command line shows the newest line."""


def is_quiet() -> bool:
    """True if notes are silenced."""
    return not NOTES.isEnabledFor(logging.WARNING)
