"""Write a file that is not there yet: what a command makes for its user, who keeps it."""

from __future__ import annotations

from pathlib import Path

from echelon.core.errors import ConfigError
from echelon.core.rulebook.command_line import CANNOT_WRITE, NEVER_OVERWRITE


def write_new(file: Path, text: str, *, key: str = "FILE") -> None:
    """Write a file; ConfigError, with a name that is free, where there is one of its name."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        problem = NEVER_OVERWRITE.problem(
            f"{file} exists and is left as it is", key=key, works=[_free_name(file)]
        )
        raise ConfigError(problem) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = CANNOT_WRITE.problem(f"{file} cannot be written: {reason}", key=key)
        raise ConfigError(problem) from error


def _free_name(file: Path) -> Path:
    # A folder is taken too, but it is no file: the name of a run file goes into it.
    taken = file / "run.toml" if file.is_dir() else file
    if not taken.exists():
        return taken
    number = 2
    while (free := taken.with_stem(f"{taken.stem}-{number}")).exists():
        number += 1
    return free
