# SPDX-License-Identifier: Apache-2.0
"""Rules about the shape of a model, and about Hugging Face config.json files."""

from echelon.core.rules import Rule

HEADS_DIVIDE_HIDDEN = Rule(
    id="heads-divide-hidden",
    why="""
    Without a head_dim of its own, a head is hidden / heads wide, which must be a whole number.
    """,
    bad="""
    [model]
    hidden = 100
    heads = 6
    """,
    fixed="""
    [model]
    hidden = 96
    heads = 6                   # or: head_dim = 16
    """,
)

KV_HEADS_DIVIDE_HEADS = Rule(
    id="kv-heads-divide-heads",
    why="In grouped-query attention each key/value head serves an equal number of query heads.",
    example="""
    [model]
    heads = 8
    %s
    """,
    bad="kv_heads = 3",
    fixed="kv_heads = 4",
)

ROPE_NEEDS_EVEN_HEAD = Rule(
    id="rope-needs-even-head",
    why="Rotary positions turn pairs of dims, so the width of a head is even.",
    example="""
    [model]
    %s
    """,
    bad="head_dim = 15",
    fixed="head_dim = 16",
)

ROPE_SCALING_ORDER = Rule(
    id="rope-scaling-order",
    why="""
    Llama 3.1 stretches frequencies of fewer than low_frequency_factor turns over the original
    positions, keeps those of more than high_frequency_factor, and blends between; so low < high.
    YaRN has slow_turns and fast_turns for the same.
    """,
    bad="""
    [model.rope_scaling]
    low_frequency_factor = 4.0
    high_frequency_factor = 1.0
    """,
    fixed="""
    [model.rope_scaling]
    low_frequency_factor = 1.0
    high_frequency_factor = 4.0
    """,
)

ROPE_SCALING_FACTORS = Rule(
    id="rope-scaling-factors",
    why="""
    LongRoPE divides each rotary frequency by a number of its own, and a head has one frequency for
    each pair of dims that turn: the lists are half as long as a head is wide.
    """,
    example="""
    [model]
    head_dim = 8

    [model.rope_scaling]
    kind = "longrope"
    %s
    """,
    bad="long_factors = [1.0, 2.0]",
    fixed="long_factors = [1.0, 1.5, 2.0, 4.0]",
)

EXPERTS_ENOUGH = Rule(
    id="experts-enough",
    why="A token meets top_k different experts, and at least one block has experts.",
    bad="""
    [model.experts]
    num_experts = 4
    top_k = 8
    """,
    fixed="""
    [model.experts]
    num_experts = 8
    top_k = 4
    """,
)

HF_CONFIG_UNREADABLE = Rule(
    id="hf-config-unreadable",
    why="""
    model.hf_config is the config.json that lies beside the weights of a Hugging Face model: one
    JSON object.
    """,
    example="""
    [model]
    %s
    """,
    bad='hf_config = "model.safetensors"',
    fixed='hf_config = "Llama-3.1-8B/config.json"',
)

HF_CONFIG_MODEL_TYPE = Rule(
    id="hf-config-model-type",
    why="""
    Only architectures that Echelon computes exactly are read: a look-alike with another norm or
    another attention would load, train, and be a different model. One that nobody here knows is
    planned as a decoder like Llama where its keys say how large it is, with what is assumed
    listed; one that has other parts (an encoder, a part for images, experts) is not.
    """,
    bad='{"model_type": "bloom", ...}',
    fixed='{"model_type": "llama", ...}',
)

ASSUMED_MODEL_NEEDS_YES = Rule(
    id="assumed-model-needs-yes",
    why="""
    The model_type of model.hf_config is not known, so the plan is that of a decoder like Llama, and
    `echelon plan` lists what is assumed. To train it, to start from its weights, or to prove a run
    that does, somebody who knows the model says that what is assumed is so: model.assume = true.
    Settings of [model] correct what is not.
    """,
    example="""
    [model]
    hf_config = "new-model/config.json"         # "model_type": "new_model"
    %s
    """,
    bad="assume = false",
    fixed="assume = true",
)

ASSUME_WITHOUT_EFFECT = Rule(
    id="assume-without-effect",
    why="""
    model.assume says yes to what is assumed of a model whose architecture is not known. Of one that
    is known nothing is assumed, and the setting would change nothing.
    """,
    example="""
    [model]
    %s
    """,
    bad="""
    preset = "llama3.2-1b"
    assume = true
    """,
    fixed='preset = "llama3.2-1b"',
)

HF_CONFIG_MISSING_KEY = Rule(
    id="hf-config-missing-key",
    why="A count that the architecture cannot do without is absent from config.json.",
    bad='{"model_type": "llama", "hidden_size": 4096, ...}     # no num_hidden_layers',
    fixed='{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, ...}',
)

HF_CONFIG_VALUE = Rule(
    id="hf-config-value",
    why="""
    config.json asks for something of this architecture that Echelon does not compute, or a value
    has the wrong type. Leaving it out would give a different model under the same name.
    """,
    bad='{"model_type": "llama", "hidden_act": "relu", ...}',
    fixed='{"model_type": "llama", "hidden_act": "silu", ...}',
)

VOCABULARY_HOLDS_TOKENIZER = Rule(
    id="vocabulary-holds-tokenizer",
    why="""
    Every id that the tokenizer gives needs a row of the embedding. "bytes" has 257 ids (256 bytes
    and the end of a document), "bpe-N" up to N. A larger vocabulary is fine.
    """,
    example="""
    [model]
    %s
    [data]
    tokenizer = "bytes"
    """,
    bad="vocab = 256",
    fixed="vocab = 257",
)
