# SPDX-License-Identifier: Apache-2.0
"""Rules about context parallelism: how a sequence, and the heads of attention, are cut over cp."""

from echelon.core.rules import Rule

CONTEXT_DIVIDES_SEQUENCE = Rule(
    id="context-divides-sequence",
    why="""
    Each context rank holds an equal part of a sequence, so cp must divide sequence_length. With
    "ring", "gathered" and "ulysses-ring" the sequence is cut into two chunks for each of the n
    places of a ring, n = cp / ulysses_degree, and place i holds chunks i and 2n - 1 - i: so the
    work of a causal mask is the same everywhere (Llama 3, 2024, section 3.3.2). Then 2n must divide
    sequence_length, too. "striped" deals out single tokens and "ulysses" has no ring: cp is enough.
    """,
    example="""
    [mesh]
    cp = 4
    [batch]
    %s
    """,
    bad="sequence_length = 252       # 4 x 63, but not a multiple of 2 x 4",
    fixed="sequence_length = 256",
)

ULYSSES_DIVIDES_HEADS = Rule(
    id="ulysses-divides-heads",
    why="""
    Ulysses exchanges heads for positions: within attention each of ulysses_degree ranks has all
    positions of its group, and an equal share of the query heads (Jacobs et al., "DeepSpeed
    Ulysses", 2023). So the degree must divide the query heads that tensor parallelism leaves on a
    rank, heads / tp. Key/value heads may be fewer: they are replicated as needed.
    """,
    example="""
    [model]
    heads = 4
    [mesh]
    cp = 8
    [context]
    %s
    """,
    bad='kind = "ulysses"            # 4 heads over 8 ranks',
    fixed="""
    kind = "ulysses-ring"
    ulysses_degree = 4          # a ring of 2 such groups
    """,
)

ULYSSES_DIVIDES_CP = Rule(
    id="ulysses-divides-cp",
    why="""
    The context ranks form cp / ulysses_degree groups of ulysses_degree neighbours: heads are
    exchanged within a group, keys and values go around a ring of groups (Fang & Zhao, "USP", 2024).
    With "ulysses" there is one group, and its degree is cp.
    """,
    example="""
    [mesh]
    cp = 4
    [context]
    kind = "ulysses-ring"
    %s
    """,
    bad="ulysses_degree = 3",
    fixed="ulysses_degree = 2",
)

ATTENTION_KERNEL_TAKES = Rule(
    id="attention-kernel-takes",
    why="""
    Each kernel of attention takes some dtypes, widths of heads and devices. FlashAttention and
    cuDNN run on GPUs, in bf16 or fp16, with heads of a multiple of 8 elements, up to 256 for
    FlashAttention and 128 for cuDNN, and have no cap on scores. "plain" takes everything. "auto",
    the default, is the fastest kernel that takes the run: on Hopper and Blackwell cuDNN's for
    whole squares of attention, and FlashAttention for all else. `echelon plan` says what it is.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [precision]
    parameters = "%s"
    [context]
    attention = "cudnn"
    """,
    bad="fp32",
    fixed="bf16",
)
