"""Each operator of PyTorch that only a GPU runs has the arguments that we give it, by this build.

A name that has changed is found here, where nothing can run it. Calls on shapes are in the tests of
the kernels themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

FLASH_SIZES = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
BACKWARD = ("query", "key", "value", "out", "logsumexp")
SEEDS = ("philox_seed", "philox_offset")
GIVEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "_flash_attention_forward": (
        ("query", "key", "value", *FLASH_SIZES, "dropout_p", "is_causal", "return_debug_mask"),
        ("scale", "window_size_left", "window_size_right"),
    ),
    "_flash_attention_backward": (
        ("grad_out", *BACKWARD, *FLASH_SIZES, "dropout_p", "is_causal", "rng_state", "unused"),
        ("scale", "window_size_left", "window_size_right"),
    ),
    "_scaled_dot_product_flash_attention": (
        ("query", "key", "value", "dropout_p", "is_causal"),
        ("scale",),
    ),
    "_scaled_dot_product_flash_attention_backward": (
        ("grad_out", *BACKWARD, *FLASH_SIZES, "dropout_p", "is_causal", *SEEDS),
        ("scale",),
    ),
    "_scaled_dot_product_cudnn_attention": (
        *(("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),),
        ("scale",),
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        ("grad_out", *BACKWARD, *SEEDS, "attn_bias", *FLASH_SIZES, "dropout_p", "is_causal"),
        ("scale",),
    ),
    "_scaled_dot_product_efficient_attention": (
        *(("query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),),
        ("scale",),
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        (
            *("grad_out_", "query", "key", "value", "attn_bias", "out", "logsumexp", *SEEDS),
            *("dropout_p", "grad_input_mask", "is_causal"),
        ),
        ("scale",),
    ),
    "_grouped_mm": (("self", "mat2"), ("offs",)),
    "mm.dtype_out": (("self", "mat2"), ("out_dtype", "out")),
    "addmm.dtype_out": (("self", "mat1", "mat2"), ("out_dtype", "out")),
}
"""What is given by place, in order, and by name."""
RESULTS = {"_flash_attention_forward": 5, "_scaled_dot_product_cudnn_attention": 9}


@pytest.mark.parametrize("name", GIVEN)
def test_an_operator_has_the_arguments_that_we_give_it(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator: Any = getattr(getattr(torch.ops.aten, packet), overload or "default")
    arguments = operator._schema.arguments
    by_place, by_name = GIVEN[name]
    assert tuple(one.name for one in arguments[: len(by_place)]) == by_place
    assert set(by_name) <= {one.name for one in arguments}
    left = [one for one in arguments[len(by_place) :] if one.name not in by_name]
    # What we do not give has a default.
    assert all(one.has_default_value() for one in left), [one.name for one in left]
    if name in RESULTS:
        assert len(operator._schema.returns) == RESULTS[name]


def test_pytorch_knows_the_implementations_of_flash_attention() -> None:
    attention: Any = torch.nn.attention
    assert callable(attention.activate_flash_attention_impl)
    assert "FA3" in attention.list_flash_attention_impls()
