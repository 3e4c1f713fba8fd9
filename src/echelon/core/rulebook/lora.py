# SPDX-License-Identifier: Apache-2.0
"""Rules about adapters that are trained over a frozen model."""

from echelon.core.rules import Rule

LORA_TARGETS = Rule(
    id="lora-targets",
    why="""
    lora.targets names linear layers of blocks: q, k, v, o of attention, gate, up, down of the MLP,
    or "all-linear" for those that the model has. An MLP without a gate has no layer "gate"; latent
    attention has q_down, kv_down, q_up and kv_up in the place of q, k and v, and without a vector
    of queries no q_down. An adapter of a layer that is not there would train nothing.
    """,
    example="""
    [model]
    gated = false
    [lora]
    rank = 8
    targets = %s
    """,
    bad='["gate", "up"]',
    fixed='["up", "down"]',
)

LORA_MODEL = Rule(
    id="lora-model",
    why="""
    Adapters stand beside the layers of attention, latent attention included, and of a dense MLP. A
    mixture multiplies the rows of all experts at once, and has no place for adapters there, while
    gate, up and down name layers of routed and shared experts alike: nothing would be trained where
    adapters were asked for. Beside its attention such a model has adapters, over frozen experts.
    """,
    example="""
    [model]
    preset = "deepseek-v3"
    [lora]
    rank = 16
    targets = %s
    """,
    bad='"all-linear"',
    fixed='["q_down", "kv_down", "q_up", "kv_up", "o"]',
)

LORA_DROPOUT = Rule(
    id="lora-dropout",
    why="""
    PEFT drops elements of what an adapter reads. Here no mask is drawn inside of linear layers, so
    a run with lora.dropout above 0 would train other numbers than it says. Most recipes of today
    have none (Schulman et al., "LoRA Without Regret", 2025).
    """,
    example="""
    [lora]
    rank = 16
    %s
    """,
    bad="dropout = 0.05",
    fixed="dropout = 0.0",
)

LORA_FULL_PRECISION = Rule(
    id="lora-full-precision",
    why="""
    Layers that multiply 8-bit numbers, and stage 3 that gathers codes of weights, keep other inputs
    for their gradients than adapters read. With adapters products and gathers have the dtype of
    parameters.
    """,
    example="""
    [precision]
    %s
    parameters = "bf16"
    [lora]
    rank = 16
    """,
    bad='matmul = "fp8"',
    fixed='matmul = "parameters"',
)

LORA_OVERLAP = Rule(
    id="lora-overlap",
    why="""
    With mesh.tp_overlap rows travel in chunks, each beside a product of its own. What an adapter
    adds is no part of those products.
    """,
    example="""
    [mesh]
    tp = 4
    sequence_parallel = true
    %s
    [lora]
    rank = 16
    """,
    bad='tp_overlap = "ring"',
    fixed='tp_overlap = "none"',
)

LORA_REPLICAS = Rule(
    id="lora-replicas",
    why="""
    Islands of local SGD, parameter servers and replicas on threads exchange all parameters of a
    model, of which adapters are a small part. With adapters replicas sum gradients in each step:
    that is all of the adapters, and little.
    """,
    example="""
    [lora]
    rank = 16
    [threads]
    %s
    """,
    bad="replicas = 2",
    fixed="replicas = 1",
)

PROVE_FROZEN = Rule(
    id="prove-frozen",
    why="""
    Below adapters the weights of the model stay as they were, bit for bit, on every rank and after
    every step, and no rank holds a gradient of them. Weight decay, a bucket that is updated with
    its neighbours, or a gather that rounds would move them a little in each step, and the adapters
    would belong to another model than the one that they are merged into.
    """,
    bad="for bucket in buckets: update(bucket)",
    fixed="for bucket in trained: update(bucket)",
)
