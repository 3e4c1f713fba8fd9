"""What a machine needs to make kernels, and that it is asked for."""

from __future__ import annotations

import shutil
from importlib.machinery import ModuleSpec

import pytest

from echelon.core.choices.kernels import Kernels
from echelon.core.errors import EnvironmentProblem
from echelon.launch import room
from echelon.launch.room import cpp_compiler, require_kernels

TRITON = Kernels(provider="triton", fused=("norm",))
COMPILED = Kernels(provider="compiled", fused=("norm",))


@pytest.mark.parametrize("wanted", [TRITON, COMPILED], ids=["triton", "compiled"])
def test_on_gpus_triton_is_asked_for(monkeypatch: pytest.MonkeyPatch, wanted: Kernels) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: ModuleSpec(name, None))
    require_kernels(wanted, "nccl")
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem) as failed:
        require_kernels(wanted, "nccl", set_by="a test")
    (problem,) = failed.value.problems
    assert (problem.rule, problem.set_by) == ("kernels-can-be-made", "a test")
    assert "triton" in problem.message
    require_kernels(Kernels(), "nccl")
    # A proof of such a plan runs on processors, where each kernel is its formula.
    require_kernels(TRITON, "gloo")


def test_on_processors_a_compiler_is_asked_for() -> None:
    here = {"CXX": shutil.which("sh") or "sh"}
    require_kernels(COMPILED, "gloo", environment=here)
    with pytest.raises(EnvironmentProblem) as failed:
        require_kernels(COMPILED, "gloo", environment={"CXX": "no-such-compiler"})
    (problem,) = failed.value.problems
    assert "no-such-compiler" in problem.message
    assert problem.suggestions[0] == 'kernels.provider = "plain"'
    assert cpp_compiler({}) in ("g++", "clang++")
