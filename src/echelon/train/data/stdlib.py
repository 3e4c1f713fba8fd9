"""The built-in corpus: the source of Python's standard library, which is on every machine.

Tests, installed packages, machine-written tables (code pages, build settings, help topics) and the
compiled are left out: about 10 MB of text that people wrote.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

from echelon.core.errors import DataError
from echelon.core.rulebook.data import DATA_EMPTY
from echelon.train.data.sources import SourceFile

STDLIB = "stdlib"

_LEFT_OUT_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


def stdlib_files(folder: Path | None = None) -> tuple[SourceFile, ...]:
    """Return the source files, in the order of the hash of their names.

    So the head of the corpus (under a limit) and its tail (the validation part) are both samples of
    all of it, and not the modules from "a" or those up to "z".
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    found: list[SourceFile] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if _is_kept(name)]
        for name in names:
            path = Path(parent, name)
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and path.is_file():
                found.append(
                    SourceFile(path=path, name=path.relative_to(root).as_posix(), format="text")
                )
    if not found:
        raise DataError(
            DATA_EMPTY.problem(
                f"this Python keeps no source of its standard library in {root}; name a source",
                key="data.source",
            )
        )
    return tuple(sorted(found, key=lambda file: hashlib.sha256(file.name.encode()).digest()))


def _is_kept(folder: str) -> bool:
    return folder not in _LEFT_OUT_FOLDERS and not folder.startswith(("config-", "."))
