"""A mixture in a run file: what is read of it, and each way in which it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.files.show import resolved_toml
from echelon.config.load import load_job
from echelon.core.settings.list_types import MixturePart
from tests.config.problems import SMALL, problems_of, write

MIXTURE = """
[[data.mixture]]
path = "web"
weight = 9
until_step = 100
[[data.mixture]]
path = "stdlib"
weight = 1
until_step = 100
[[data.mixture]]
path = "stdlib"
weight = 0.5
"""


def test_sources_are_relative_to_the_file_and_survive_writing(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, SMALL + MIXTURE))
    assert job.data.mixture == (
        MixturePart(path=str(tmp_path / "web"), weight=9.0, until_step=100),
        MixturePart(path="stdlib", weight=1.0, until_step=100),
        MixturePart(path="stdlib", weight=0.5),
    )
    again = tmp_path / "again"
    again.mkdir()
    assert load_job(write(again, resolved_toml(job))).data == job.data
    assert type(job).from_ranks(job.for_ranks()) == job


@pytest.mark.parametrize(
    ("value", "rule", "said"),
    [
        ('[{ path = "a", weight = 0 }]', "mixture-parts", "weight = 0, which is not above 0"),
        ('[{ path = "a", weight = -1.5 }]', "mixture-parts", "not above 0"),
        ('[{ path = "a", weight = nan }]', "mixture-parts", "not above 0"),
        ('[{ path = "a" }]', "mixture-parts", "has no weight"),
        ("[{ weight = 1 }]", "mixture-parts", "has no path"),
        ('[{ path = "a", weight = 1, until_step = 0 }]', "mixture-parts", "no whole number from 1"),
        ('[{ path = "a", weight = 1, untill = 3 }]', "mixture-parts", "untill, which is not known"),
        ("[]", "wrong-type", "no list of tables"),
        ('"web"', "wrong-type", "no list of tables"),
        (
            '[{ path = "a", weight = 1 }, { path = "a", weight = 2 }]',
            "mixture-schedule",
            "has 2 weights in the last phase",
        ),
        (
            '[{ path = "a", weight = 1, until_step = 5 }]',
            "mixture-schedule",
            "no weight holds from step 5 on",
        ),
        (
            '[{ path = "a", weight = 1, until_step = 10000000 }, { path = "a", weight = 1 }]',
            "mixture-schedule",
            "never reached",
        ),
        (
            '[{ path = "a", weight = 1e9 }, { path = "b", weight = 1 }]',
            "mixture-parts",
            "has a share of 1.0e-09 only",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, value: str, rule: str, said: str) -> None:
    found = problems_of(write(tmp_path, SMALL), [f"data.mixture={value}"])
    assert list(found) == [rule]
    assert said in found[rule].message


def test_it_takes_the_place_of_a_source_and_has_no_padded_epoch(tmp_path: Path) -> None:
    mixture = 'data.mixture=[{ path = "a", weight = 1 }]'
    found = problems_of(write(tmp_path, SMALL), [mixture, "data.source=b"])
    assert list(found) == ["conflicting-settings"]
    found = problems_of(write(tmp_path, SMALL), [mixture, "data.epoch_end=pad"])
    assert list(found) == ["no-effect"]
