"""An error of `ec.plan` names the keywords that a program gave, not the flags of a command."""

from __future__ import annotations

import pytest

from echelon.api.planning import errors_in_keywords, keywords_from_flags
from echelon.core.errors import ConfigError, InfeasiblePlan, Problem


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("--cluster 8xh200", 'cluster="8xh200"'),
        ("--pin tp=4 --pin pp=2", 'pins=["tp=4", "pp=2"]'),
        (
            "--cluster 8xh200 --pin devices=8 --set precision.parameters=bf16",
            'cluster="8xh200" with pins=["devices=8"] with settings=["precision.parameters=bf16"]',
        ),
        ("--cluster 'my cluster.toml'", 'cluster="my cluster.toml"'),
        ("--pin tp=2,4", 'pins=["tp=2,4"]'),
        ("--price 2.5", "price=2.5"),
        ("--set name='a", "--set name='a"),
        ("--search", "search=True"),
    ],
)
def test_flags_become_keywords(flags: str, keywords: str) -> None:
    assert keywords_from_flags(flags) == keywords


def test_every_part_of_a_problem_is_said_anew() -> None:
    problem = Problem(
        rule="unknown-trainer",
        message="--trainer megatorn: there are no figures of that trainer.",
        key="mesh.tp",
        set_by="--cluster 8xh100, --set mesh.tp=3",
        suggestions=("--trainer megatron-core", "1", "batch.global_sequences = 8"),
    )
    with pytest.raises(InfeasiblePlan) as caught, errors_in_keywords({}):
        raise InfeasiblePlan([problem, problem])
    assert len(caught.value.problems) == 2
    told = caught.value.problems[0]
    assert told.message == 'trainer="megatorn": there are no figures of that trainer.'
    assert told.set_by == 'cluster="8xh100", settings=["mesh.tp=3"]'
    assert told.suggestions == ('trainer="megatron-core"', "1", "batch.global_sequences = 8")
    assert (told.rule, told.key) == ("unknown-trainer", "mesh.tp")


def test_what_was_given_is_said_as_it_was_written() -> None:
    given = {"data.source=a b": 'settings=["data.source=a b"]', "mesh.tp=3": "mine"}
    problem = Problem(
        rule="bad-argument",
        message="--pin mesh.tp=3 is none",
        set_by="--set data.source=a b, --set mesh.tp=32",
    )
    with pytest.raises(ConfigError) as caught, errors_in_keywords(given):
        raise ConfigError(problem)
    told = caught.value.problems[0]
    assert told.message == "mine is none"
    assert told.set_by == 'settings=["data.source=a b"], settings=["mesh.tp=32"]'


def test_what_is_no_flag_of_a_plan_stays() -> None:
    text = "echelon config presets --json, or --out run.toml"
    problem = Problem(rule="bad-argument", message=text)
    with pytest.raises(ConfigError) as caught, errors_in_keywords({}):
        raise ConfigError(problem)
    assert caught.value.problems[0].message == text
