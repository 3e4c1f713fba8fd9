"""Mistakes in a user's file: each is one clear error with a rule, and the line where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.core.errors import ConfigError, EnvironmentProblem
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.proof.verify.subject_file import SubjectFile
from tests.proof.verify.planted_programs import proof_of, written


def test_what_the_constants_say_is_read(tmp_path: Path) -> None:
    settings = SubjectFile(written(tmp_path, "ddp")).settings(None)
    assert settings.precisions == ("float64", "float32")
    case = settings.case(1, "float64", torch.device("cpu"))
    assert (case.rank, case.world_size, case.mesh, case.degrees) == (1, 2, {"dp": 1}, {"dp": 2})
    assert (case.dtype, case.seed, case.num_steps) == (torch.float64, 0, 3)


@pytest.mark.parametrize(
    ("changes", "ranks", "told"),
    [
        ({'MESH = {"dp": 2}': "MESH = 2"}, None, ["error[verify-mesh]", 'MESH = {"dp": 2}']),
        ({}, 4, ["error[verify-mesh]", "dp2: 2 ranks, not 4", "--ranks 2"]),
        (
            {"DTYPE = torch.float32": "DTYPE = torch.int32\nNUM_STEPS = 0"},
            None,
            ["DTYPE of ddp.py is int32", "NUM_STEPS of ddp.py is 0"],
        ),
    ],
)
def test_a_wrong_constant_is_told(
    changes: dict[str, str], ranks: int | None, told: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        SubjectFile(written(tmp_path, "ddp", changes)).settings(ranks)
    assert [text for text in told if text not in str(caught.value)] == []


def test_a_file_that_is_not_there_or_lacks_a_function_is_told(tmp_path: Path) -> None:
    written(tmp_path, "ddp")
    with pytest.raises(ConfigError, match=r"verify-file.*there is no file.*\n.*ddp.py"):
        SubjectFile(tmp_path / "dpp.py")
    changes = {"def one_device(case": "def one(case"}
    with pytest.raises(ConfigError, match=r"ddp.py has no function one_device"):
        SubjectFile(written(tmp_path, "ddp", changes))
    written(tmp_path, "ddp")
    with pytest.raises(ConfigError, match=r"ddp.py has no function on_rank_fixed"):
        SubjectFile(tmp_path / "ddp.py:on_rank_fixed")
    with pytest.raises(ConfigError) as caught:
        SubjectFile(tmp_path / "none.py")
    assert caught.value.rules == ("verify-file",)
    (tmp_path / "far.py").write_text("import no_such_framework.engine\n")
    with pytest.raises(EnvironmentProblem, match="needs no_such_framework") as absent:
        SubjectFile(tmp_path / "far.py")
    assert absent.value.rules == ("verify-package",)
    (tmp_path / "broken.py").write_text("def one_device(:\n")
    with pytest.raises(ConfigError, match=r"verify-raised.*SyntaxError"):
        SubjectFile(tmp_path / "broken.py")


MISTAKES = {
    "raises": ({"loss.backward()": "loss.backwards()"}, "verify-raised"),
    "returns": ({"return ec.OnRank(": "return dict("}, "verify-returned"),
    "no optimizer": ({"step=step, optimizer=optimizer": "step=step"}, "verify-optimizer"),
    "no number": ({'{"loss": loss, "grad_norm": norm}': '{"lose": loss}'}, "verify-returned"),
    "one device": ({"model=model, loss=loss": "model=None, loss=loss"}, "verify-returned"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_a_rank_is_one_error(
    mistake: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    changes, rule = MISTAKES[mistake]
    with pytest.raises(RankFailure) as caught:
        proof_of(rank_pool, tmp_path, "ddp", changes)
    error = caught.value.error
    assert isinstance(error, ConfigError)
    assert error.rules == (rule,)
    if mistake == "raises":
        text = str(error)
        assert "ddp.py:" in text
        assert "(loss.backwards())" in text
        assert "step 0, rank" in text
