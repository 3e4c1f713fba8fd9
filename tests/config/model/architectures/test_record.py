"""What shows the names of files, where models of one architecture differ in them."""

from __future__ import annotations

from dataclasses import replace

from echelon.config.model.architectures.table import ARCHITECTURES
from tests.parallel.layouts import NANO


def test_falcons_with_two_norms_have_other_names() -> None:
    falcon = ARCHITECTURES["falcon"]
    assert falcon.more_tensors(NANO) == ()
    two = replace(NANO, residual="parallel")
    assert falcon.more_tensors(two) == ("transformer.h.0.ln_mlp.weight",)
    assert ARCHITECTURES["gpt_neox"].more_tensors(two) == ()
