"""What every part of a block reads, and terms that add up."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.cost.inputs.cost_inputs import Terms
from tests.cost.seconds.small_work import small_work, with_trainer


def test_tokens_of_a_microbatch_are_shared_by_context_ranks() -> None:
    assert small_work(microbatch=4.0, cp=2.0).tokens == 4 * 128 / 2
    several = small_work(cp=np.array([1.0, 2.0, 8.0]), microbatch=2.0)
    assert np.asarray(several.tokens).tolist() == [256.0, 128.0, 32.0]
    assert with_trainer(small_work(), element_bytes=4.0).element == 4.0


def test_terms_add_up_for_numbers_and_arrays() -> None:
    terms = Terms(terms={"a": 1.5, "b": np.array([1.0, 2.0]), "c": 0.25})
    assert np.asarray(terms.total).tolist() == pytest.approx([2.75, 3.75])
    assert Terms(terms={}).total == 0.0
