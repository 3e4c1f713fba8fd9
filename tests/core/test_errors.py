"""Errors carry every problem; each is rendered with its rule, its source, and what works."""

from __future__ import annotations

import pickle

import pytest

from echelon.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EchelonError,
    EnvironmentProblem,
    InfeasiblePlan,
    Problem,
    ProofFailed,
    RunFailed,
)

SPLIT = Problem(
    rule="tp-divides-kv-heads",
    message="parallel.tp = 8, but llama-tiny has 6 key/value heads (6 % 8 != 0)",
    key="mesh.tp",
    set_by="--set mesh.tp=8",
    suggestions=("1", "2", "3", "6"),
)
BARE = Problem(rule="config-key", message="mesh.ppp is not a key")


def test_a_problem_says_what_where_and_what_works() -> None:
    assert SPLIT.render() == (
        "error[tp-divides-kv-heads]: parallel.tp = 8, but llama-tiny has 6 key/value heads"
        " (6 % 8 != 0)\n"
        "  set by: --set mesh.tp=8      works here: 1, 2, 3 or 6      "
        "more: echelon explain tp-divides-kv-heads"
    )
    assert BARE.render() == (
        "error[config-key]: mesh.ppp is not a key\n  more: echelon explain config-key"
    )


def test_a_problem_for_machines() -> None:
    assert SPLIT.to_json() == {
        "rule": "tp-divides-kv-heads",
        "message": SPLIT.message,
        "key": "mesh.tp",
        "set_by": "--set mesh.tp=8",
        "works": ["1", "2", "3", "6"],
    }


def test_an_error_carries_all_problems_in_order() -> None:
    error = ConfigError([BARE, SPLIT])
    assert error.rules == ("config-key", "tp-divides-kv-heads")
    assert str(error) == f"{BARE.render()}\n{SPLIT.render()}"
    assert ConfigError(BARE).problems == (BARE,)


def test_an_error_without_a_problem_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        EchelonError([])


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigError, 2),
        (InfeasiblePlan, 2),
        (DataError, 2),
        (CheckpointError, 2),
        (EnvironmentProblem, 3),
        (ProofFailed, 1),
        (RunFailed, 4),
    ],
)
def test_errors_cross_processes_with_their_exit_code(kind: type[EchelonError], code: int) -> None:
    error = pickle.loads(pickle.dumps(kind([SPLIT, BARE])))
    assert type(error) is kind
    assert error.problems == (SPLIT, BARE)
    assert error.exit_code == code


def test_an_infeasible_plan_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError):
        raise InfeasiblePlan(SPLIT)
