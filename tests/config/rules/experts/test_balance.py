"""Settings of a balance that there is not are errors, with the balance that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SMALL, SPARSE, problems_of, write
from tests.config.suggestions import taken


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return write(tmp_path, SPARSE)


@pytest.mark.parametrize(
    "sets",
    [
        ["experts.aux_over=sequence"],
        ["experts.aux_coefficient=0.1"],
        ["experts.balance=bias", "experts.aux_coefficient=0.1"],
        ["experts.bias_rate=0.1"],
        ["experts.balance=aux", "experts.bias_rate=0.1"],
        ["experts.drop=score"],
        ["experts.capacity_factor=4"],
        ["experts.capacity_factor=3.9", "experts.drop=score"],
        ["experts.chunks=2"],
        ["mesh.dp_shard=8", "mesh.ep=8", "zero.stage=1", "experts.zero_stage=2"],
    ],
)
def test_a_setting_of_experts_without_effect_is_an_error(sparse: Path, sets: list[str]) -> None:
    found = problems_of(sparse, sets)
    assert list(found) == ["no-effect"]
    assert found["no-effect"].suggestions != ()
    for advice in found["no-effect"].suggestions:
        assert problems_of(sparse, taken(advice, sets)) == {}, advice


@pytest.mark.parametrize(
    "setting",
    [
        "mesh.ep=2",
        "experts.balance=aux",
        "experts.z_coefficient=0.001",
        "experts.capacity_factor=1.25",
        "experts.route=even",
        "experts.zero_stage=1",
        "experts.padded=true",
    ],
)
def test_a_dense_model_has_no_settings_of_experts(tmp_path: Path, setting: str) -> None:
    found = problems_of(write(tmp_path, SMALL), [setting])
    assert list(found) == ["no-effect"]
    assert "has no experts" in found["no-effect"].message
    assert len(found["no-effect"].suggestions) == 1


def test_a_setting_of_the_other_balance_leads_to_both(sparse: Path) -> None:
    sets = ["experts.balance=aux", "experts.bias_rate=0.1"]
    assert problems_of(sparse, sets)["no-effect"].suggestions[0] == 'experts.balance = "both"'
    sets = ["experts.balance=bias", "experts.aux_over=sequence"]
    assert problems_of(sparse, sets)["no-effect"].suggestions[0] == 'experts.balance = "both"'
