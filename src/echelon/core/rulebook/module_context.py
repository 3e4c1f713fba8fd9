# SPDX-License-Identifier: Apache-2.0
"""Rules about the sequences of a module of your own, cut over context ranks."""

from echelon.core.rules import Rule

MODULE_ATTENTION = Rule(
    id="module-attention",
    why="""
    Over context ranks each holds some positions of every sequence, and attention is the one place
    where positions meet. So it must be seen: a module calls
    torch.nn.functional.scaled_dot_product_attention (in transformers attn_implementation="sdpa"),
    with a causal mask, a window, or none. Attention that is computed otherwise, a mask of another
    kind, dropout in it, positions that are counted inside of the module, and checkpointing around
    it are refused. What is seen of `example` is checked: the outputs of the cut module must be
    those of the whole one.
    """,
    bad="model = AutoModelForCausalLM.from_config(config, attn_implementation='eager')",
    fixed="model = AutoModelForCausalLM.from_config(config, attn_implementation='sdpa')",
)
