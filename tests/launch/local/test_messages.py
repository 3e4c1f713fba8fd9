"""A target is named so that another process finds it; what no process finds is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from echelon.core.errors import ConfigError
from echelon.launch.local.messages import (
    Limits,
    Notice,
    RankJob,
    TargetReference,
    find_target,
    name_target,
)


def named() -> str:
    return "found"


def test_a_function_and_its_name_are_the_same_target() -> None:
    by_function, by_text = name_target(named), name_target(f"{__name__}:named")
    assert (by_function.module, by_function.name) == (by_text.module, by_text.name)
    assert by_function.file == __file__
    assert find_target(by_text) is named


def test_a_module_off_the_path_is_found_by_its_file() -> None:
    target = TargetReference(module="nowhere_to_import", name="named", file=__file__)
    assert find_target(target)() == "found"


@pytest.mark.parametrize("target", ["no.colon", ":named", "module:", lambda: None])
def test_what_has_no_name_is_refused(target: str | Callable[[], None]) -> None:
    with pytest.raises(ConfigError) as caught:
        name_target(target)
    assert caught.value.rules == ("target-not-found",)


@pytest.mark.parametrize(
    "target",
    [
        TargetReference(module="no_such_module", name="named"),
        TargetReference(module=__name__, name="absent"),
        TargetReference(module=__name__, name="__doc__"),
    ],
)
def test_what_is_not_there_is_refused(target: TargetReference) -> None:
    with pytest.raises(ConfigError) as caught:
        find_target(target)
    assert caught.value.rules == ("target-not-found",)


def test_a_job_knows_its_world_and_messages_survive_the_channel() -> None:
    job = RankJob(
        number=1,
        target=name_target(named),
        argument=None,
        labels=("pp0", "pp1"),
        backend="gloo",
        port=1,
        limits=Limits(),
        introduce=False,
    )
    assert job.world_size == 2
    assert pickle.loads(pickle.dumps(job)) == job
    assert all(pickle.loads(pickle.dumps(notice)) is notice for notice in Notice)
