"""The rank of a proof: which subjects there are."""

from __future__ import annotations

import pytest

from echelon.core.errors import ConfigError
from echelon.proof.ranks import find_factory
from echelon.training.subject import build


def test_a_subject_is_found_by_its_name() -> None:
    assert find_factory("echelon.training.subject:build") is build


@pytest.mark.parametrize(
    "subject", ["no.such.module:build", "echelon.training.subject:no_such_name", "", "math:pi"]
)
def test_what_is_no_subject_is_refused(subject: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_factory(subject)
    assert refused.value.rules == ("prove-subject",)
