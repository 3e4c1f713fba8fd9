"""Programs that a test writes to a file, right or with one line changed, and puts under proof."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from echelon.api.verifying import verify
from echelon.launch.local.supervisor import RankPool
from echelon.proof.verdict import SubjectProof
from echelon.proof.verify.verify import SubjectRanks, verify_subject

HERE = Path(__file__).parent
PROGRAMS = {"ddp": HERE.parents[2] / "examples" / "verify_ddp.py"}
"""Where the text of a program is; of others, in programs/NAME.py."""


def written(folder: Path, name: str, changes: Mapping[str, str] | None = None) -> Path:
    """Return a copy of a program in `folder`, with lines changed."""
    text = PROGRAMS.get(name, HERE / "programs" / f"{name}.py").read_text(encoding="utf-8")
    for old, new in (changes or {}).items():
        assert text.count(old) == 1, f"{name}.py has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    shutil.copy(HERE / "programs" / "net.py", folder)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


def proof_of(
    pool: RankPool, folder: Path, name: str, changes: Mapping[str, str] | None = None
) -> SubjectProof:
    """Return the proof of a program, on ranks of the session's pool."""
    ranks = SubjectRanks(run=pool.run, fresh=lambda: None)
    return verify_subject(written(folder, name, changes), ranks)


def fresh_proof_of(
    folder: Path, name: str, changes: Mapping[str, str] | None = None
) -> SubjectProof:
    """Return the proof of a program of a framework that keeps state: on ranks of its own."""
    return verify(written(folder, name, changes))
