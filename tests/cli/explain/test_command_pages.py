"""The pages of `echelon explain`: flags that they take, and those that have no effect on them."""

from __future__ import annotations

import pytest

from echelon.cli.explain.command import FLAGS, PAGES, refuse_without_effect
from echelon.core.errors import ConfigError


def test_every_flag_is_that_of_some_page_and_no_page_takes_another() -> None:
    assert {name for page in PAGES.values() for name in page.takes} == set(FLAGS)


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_takes_is_accepted_and_all_else_refused(name: str) -> None:
    given = dict[str, object](
        run="nano",
        settings=["mesh.tp=2"],
        cluster="8xh100",
        dp=4,
        parameters=7e9,
        memory_bytes=8e10,
        precision="fp32",
        pp=4,
        microbatches=8,
    )
    with pytest.raises(ConfigError) as caught:
        refuse_without_effect(name, given)
    said = " ".join(problem.message for problem in caught.value.problems)
    refused = {flag for flag in FLAGS.values() if f"{flag} " in said}
    assert refused == {FLAGS[field] for field in FLAGS if field not in PAGES[name].takes}


def test_flags_of_the_same_pages_are_one_problem_that_says_what_works() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_without_effect("units", dict(run="nano", pp=2, microbatches=8, dp=4))
    first, second = caught.value.problems
    assert first.message.startswith("--dp has an effect on `echelon explain zero`, `memory`")
    assert second.message == "--pp --microbatches has an effect on `echelon explain pipeline` only"
    assert second.suggestions == ("echelon explain pipeline --pp 4",)
    refuse_without_effect("pipeline", dict(pp=2, microbatches=8))
    with pytest.raises(ConfigError):
        refuse_without_effect(None, dict(pp=2))
