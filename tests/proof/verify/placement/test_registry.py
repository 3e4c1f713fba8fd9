"""Every framework has a name of its own, and torch reads what no other knows."""

from __future__ import annotations

from echelon.proof.verify.placement.registry import FRAMEWORKS


def test_torch_comes_last() -> None:
    names = [one.name for one in FRAMEWORKS]
    assert names[-1] == "torch"
    assert len(set(names)) == len(names)
