"""What of heads turns, in which blocks, and which norms a block has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.core.model_shape import NormPlace, Residual, Rotary
from tests.parallel.layouts import DEEPSEEK, GPT2, NANO


def test_whole_pairs_of_a_head_turn() -> None:
    wide = replace(NANO, head_dim=12)
    for fraction, dims in ((1.0, 12), (0.75, 8), (0.5, 6), (0.25, 2), (0.1, 0)):
        assert replace(wide, rotary=Rotary(fraction=fraction)).turned_dims == dims
    assert GPT2.turned_dims == 0
    assert DEEPSEEK.turned_dims == DEEPSEEK.head_dim


def test_each_so_many_th_block_turns_nothing() -> None:
    shape = replace(NANO, rotary=Rotary(none_every=2))
    assert [shape.of_layer(layer).turned_dims > 0 for layer in range(4)] == [True, False] * 2
    assert NANO.of_layer(3) is NANO


def test_scores_are_scaled_by_the_width_of_a_head_unless_it_is_said() -> None:
    assert NANO.score_scale**2 * NANO.head_dim == pytest.approx(1.0)
    assert replace(NANO, attention_scale=0.3).score_scale == 0.3


@pytest.mark.parametrize(
    ("place", "residual", "norms"),
    [
        ("before", "sequential", ("attention_norm", "mlp_norm")),
        ("after", "sequential", ("attention_post_norm", "mlp_post_norm")),
        (
            "both",
            "sequential",
            ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
        ),
        ("before", "parallel", ("attention_norm", "mlp_norm")),
        ("before", "parallel-one-norm", ("attention_norm",)),
    ],
)
def test_norms_of_a_block(place: NormPlace, residual: Residual, norms: tuple[str, ...]) -> None:
    assert replace(NANO, norm_place=place, residual=residual).norms == norms
