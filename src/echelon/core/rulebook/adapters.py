# SPDX-License-Identifier: Apache-2.0
"""Rules about files of adapters that a run starts from."""

from echelon.core.rules import Rule

ADAPTERS_READABLE = Rule(
    id="adapters-readable",
    why="""
    train.adapters is a folder as PEFT saves one: adapter_config.json says what the adapters are
    like, adapter_model.safetensors has their matrices. Both are read before any rank starts. A
    pickled adapter_model.bin is not read.
    """,
    bad="--set train.adapters=tuned     # the folder holds only adapter_model.bin",
    fixed="--set train.adapters=tuned     # saved by save_pretrained, with safetensors",
)

ADAPTERS_FIT = Rule(
    id="adapters-fit",
    why="""
    Rank, scale and layers of adapters are mathematics, so the run file says them, and the files of
    adapters must have the same: a matrix of another rank has no place, another lora.alpha would
    make another model of the same matrices, and a layer without its adapter would begin anew.
    """,
    example="""
    [train]
    adapters = "tuned"     # adapter_config.json says r = 8
    [lora]
    %s
    """,
    bad="rank = 16",
    fixed="rank = 8",
)

ADAPTERS_PLAIN = Rule(
    id="adapters-plain",
    why="""
    PEFT knows more kinds of adapters than LoRA's two matrices beside a linear layer: magnitudes
    (DoRA), biases that are trained, modules that are saved whole, ranks that differ from layer to
    layer, first values that moved the weights below (PiSSA). Whatever of that a folder asks for is
    named, for without it the matrices mean another model. Where one module of an architecture is
    several layers of ours (qkv_proj), its adapter is of none of them; such adapters are merged.
    """,
    bad='adapter_config.json with "use_dora": true',
    fixed="model.merge_and_unload().save_pretrained(DIR)     # and --set train.weights=DIR",
)
