"""Types of what changed: `python -m tests.type_check` (`--whole`: of everything, as CI does).

After a check without an error, the digest of each file is kept. The next check is of the files
that changed since then and of the files that import them. A package's `__init__.py` passes names
on, so that the files that import the package are checked, too. Everything is checked where nothing
was kept, where the settings or the packages changed, or where over a third of the files is to be
checked anyway.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = ROOT / ".cache" / "types.json"
SETTINGS = ("pyproject.toml", "constraints.txt")
FOLDERS = ("src", "tests", "web/formulas")
LEFT_OUT = "tests/proof/verify/programs/"
"""Programs of other frameworks, which pyright leaves out, too."""
LARGEST_PART = 1 / 3
IMPORT = re.compile(
    r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|[^\n]+)|import ([\w., ]+))", re.MULTILINE
)


def digests(root: Path = ROOT) -> dict[str, str]:
    """Return the digest of each file that counts, by its path."""
    stubs = [*(root / "tests/stubs").rglob("*.pyi")]
    settings = [root / name for name in SETTINGS]
    files = [file for folder in FOLDERS for file in (root / folder).rglob("*.py")]
    return {
        file.relative_to(root).as_posix(): hashlib.sha1(file.read_bytes()).hexdigest()
        for file in sorted([*files, *stubs, *settings])
        if file.is_file() and not file.relative_to(root).as_posix().startswith(LEFT_OUT)
    }


def module_of(file: str) -> str:
    """Return the module in a file: "echelon.core.mesh" of "src/echelon/core/mesh.py"."""
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(text: str) -> set[str]:
    """Return the names of modules that a text may import."""
    names: set[str] = set()
    for module, these, plain in IMPORT.findall(text):
        if plain:
            names.update(part.split()[0] for part in plain.split(",") if part.split())
        else:
            words = re.findall(r"(\w+)(?:\s+as\s+\w+)?", these)
            names.update((module, *(f"{module}.{word}" for word in words)))
    return names


def to_check(changed: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    """Return the files that changed and those that import them, of the files in `texts`."""
    importers: dict[str, set[str]] = defaultdict(set)
    for file, text in texts.items():
        for name in imported(text):
            importers[name].add(file)
    chosen = {*changed} & {*texts}
    passing = [*changed]
    while passing:
        direct = importers[module_of(passing.pop())]
        passing += [file for file in direct - chosen if file.endswith("__init__.py")]
        chosen |= direct
    return sorted(chosen)


def part(old: Mapping[str, str], new: Mapping[str, str], root: Path = ROOT) -> list[str] | None:
    """Return the files to check; None means everything."""
    changed = [file for file in {*old, *new} if old.get(file) != new.get(file)]
    if not old or any(not file.endswith(".py") for file in changed):
        return None
    files = [file for file in new if file.endswith(".py")]
    texts = {file: (root / file).read_text(encoding="utf-8") for file in files}
    chosen = to_check(changed, texts)
    return None if len(chosen) > LARGEST_PART * len(files) else chosen


def main(arguments: Sequence[str]) -> int:
    """Check, and keep the digests where nothing is wrong."""
    new = digests()
    old = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    chosen = None if "--whole" in arguments else part(old, new)
    if chosen == []:
        print("types: no file changed since the last check without an error")
        return 0
    about = "all files" if chosen is None else f"{len(chosen)} files, changed or importing what did"
    print(f"types: {about}", flush=True)
    command = [str(Path(sys.executable).with_name("pyright")), "--threads", *(chosen or ())]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not code:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(new), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
