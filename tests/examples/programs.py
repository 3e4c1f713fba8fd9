"""Proofs of the programs under examples/, on the session's ranks."""

from __future__ import annotations

from pathlib import Path

from echelon.launch.local.supervisor import RankPool
from echelon.proof.verdict import SubjectProof
from echelon.proof.verify.verify import SubjectRanks, verify_subject

ROOT = Path(__file__).resolve().parents[2]
WRONG, RIGHT = ROOT / "examples" / "wrong", ROOT / "examples" / "right"

TORCH = (
    "ddp",
    "fsdp1",
    "fsdp2",
    "dtensor_tp_sp",
    "pipeline_1f1b",
    "pipeline_interleaved",
    "zero1_by_hand",
    "hooks_and_handles",
    "zero3_by_hand",
    "tensor_parallel_by_hand",
    "ring_attention_by_hand",
    "ulysses_by_hand",
    "pipeline_by_hand",
    "experts_by_hand",
    "compiled_recompute",
)
"""Right programs that need nothing but torch."""


def proof_of_file(pool: RankPool, file: Path) -> SubjectProof:
    """Return the proof of a program that needs nothing but torch."""
    return verify_subject(file, SubjectRanks(run=pool.run, fresh=lambda: None))


def programs_in(folder: Path) -> list[str]:
    """Return the names of the programs of a folder: the files that have ranks."""
    return sorted(
        path.stem for path in folder.glob("*.py") if "def on_rank(" in path.read_text("utf-8")
    )
