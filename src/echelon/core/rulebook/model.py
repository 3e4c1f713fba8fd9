# SPDX-License-Identifier: Apache-2.0
"""Rules about the shape of a model: blocks, latent attention, kernels."""

from echelon.core.rules import Area, Rule

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


BLOCKS_AREA = Area("blocks")
"""The parts of a block: what turns, factors, norms and the way around a branch."""

TURNS_NEED_ROTARY = Rule(
    id="turns-need-rotary",
    why="""
    model.rotary says which dims of a head turn with the position. So it needs rotary positions, of
    ordinary attention: latent attention turns the dims of latent.rope_dim.
    """,
    example="""
    [model]
    %s
    """,
    bad="""
    positions = "learned"
    rotary.fraction = 0.5
    """,
    fixed="""
    positions = "rope"
    rotary.fraction = 0.5
    """,
)

HEADS_TURN = Rule(
    id="heads-turn",
    why="""
    Dims turn in pairs, so of a head rotary.fraction x head_dim dims turn, rounded down to an even
    number. Where that is none, no position would enter: rotary.none_every is for blocks like that.
    """,
    example="""
    [model]
    head_dim = 8
    [model.rotary]
    %s
    """,
    bad="fraction = 0.2              # 8 x 0.2 = 1.6, rounded down to 0",
    fixed="fraction = 0.25",
)

FACTOR_WITHOUT_DROPOUT = Rule(
    id="factor-without-dropout",
    why="""
    What a branch adds to the stream is multiplied by multipliers.residual, and token vectors by
    multipliers.embedding; or a part of them is dropped. The bytes of both at once have no formula,
    and no model that is known was trained so.
    """,
    bad="""
    [model]
    dropout = 0.1
    [model.multipliers]
    residual = 0.22
    """,
    fixed="""
    [model]
    dropout = 0.0
    [model.multipliers]
    residual = 0.22
    """,
)

BLOCK_FORMS_COMPOSE = Rule(
    id="block-forms-compose",
    why="""
    Norms after branches (model.norm_place), and attention beside the MLP (model.residual), are
    computed, split and counted for blocks of ordinary attention and a dense MLP, without dropout;
    and not both of them at once. Codes of 8 bits need a norm before each branch.
    """,
    example="""
    [model]
    residual = "parallel"
    %s
    """,
    bad='norm_place = "both"',
    fixed='norm_place = "before"',
)


LATENT_AREA = Area("latent")
"""Multi-head latent attention."""

_LATENT = """[model.latent]
    query_rank = 48
    kv_rank = 32
    nope_dim = 16
    rope_dim = 8
    value_dim = 16"""

LATENT_HEADS_HAVE_KEYS = Rule(
    id="latent-heads-have-keys",
    why="""
    In latent attention the keys and values of all heads are made out of one narrow vector
    (DeepSeek-V2, 2024, section 2.1): that is what saves memory, and every head has keys of its own.
    So kv_heads is heads.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="kv_heads = 2",
    fixed="kv_heads = 4",
)

LATENT_HEAD_HAS_TWO_PARTS = Rule(
    id="latent-head-has-two-parts",
    why="""
    A head of latent attention has nope_dim dims without positions, and rope_dim dims that rotary
    positions turn (DeepSeek-V2, 2024, section 2.1.3). head_dim is their sum, and need not be set.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="""
    kv_heads = 4
    head_dim = 32               # 16 + 8 = 24
    """,
    fixed="kv_heads = 4",
)

LATENT_POSITIONS_ARE_ROTARY = Rule(
    id="latent-positions-are-rotary",
    why="""
    Latent attention has a part of each head for rotary positions, rope_dim dims, so positions enter
    there.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="""
    kv_heads = 4
    positions = "learned"
    """,
    fixed="kv_heads = 4",
)

LATENT_ATTENTION_IS_PLAIN = Rule(
    id="latent-attention-is-plain",
    why="""
    Latent attention norms its narrow vectors, not each head, and its matrices have no biases:
    qkv_bias, output_bias and qk_norm are about ordinary attention.
    """,
    example=f"""
    [model]
    heads = 4
    %s
    {_LATENT}
    """,
    bad="""
    kv_heads = 4
    qk_norm = true
    """,
    fixed="kv_heads = 4",
)

LATENT_VALUE_FITS_KEY = Rule(
    id="latent-value-fits-key",
    why="""
    Attention is computed for keys and values of one width: values of latent attention, narrower
    than keys, get zeros behind them (128 dims beside 192 in DeepSeek-V3). So value_dim is at most
    nope_dim + rope_dim.
    """,
    bad="""
    [model]
    heads = 4
    kv_heads = 4
    [model.latent]
    query_rank = 48
    kv_rank = 32
    nope_dim = 16
    rope_dim = 8
    value_dim = 32              # 16 + 8 = 24
    """,
    fixed=f"""
    [model]
    heads = 4
    kv_heads = 4
    {_LATENT}
    """,
)


KERNELS_AREA = Area("kernels")
"""What computes the pieces between products."""

TRITON_NEEDS_GPU = Rule(
    id="triton-needs-gpu",
    why="""
    Triton makes kernels for GPUs. On processors the same pieces are PyTorch's operations
    ("plain"), or what PyTorch's compiler makes of their formulas ("compiled", by the C++ compiler
    of the machine). A plan for GPUs is still proven on processors: there each kernel is its
    formula.
    """,
    example="""
    [cluster]
    preset = "laptop"
    [kernels]
    %s
    """,
    bad='provider = "triton"',
    fixed='provider = "compiled"',
)

RESIDUAL_NEEDS_NORM = Rule(
    id="residual-needs-norm",
    why="""
    "residual" adds a branch's output to the residual stream in the kernel of the norm that comes
    next, and in backward the gradients of both ways in the kernel of that norm: one pass over the
    stream less each. Without "norm" there is no such kernel.
    """,
    example="""
    [cluster]
    preset = "8xh100"
    [kernels]
    %s
    """,
    bad='fused = ["residual", "swiglu"]',
    fixed='fused = ["norm", "residual", "swiglu"]',
)

KERNELS_CAN_BE_MADE = Rule(
    id="kernels-can-be-made",
    why="""
    Kernels in Triton are compiled by the package `triton`, which comes with PyTorch's builds for
    CUDA. "compiled" needs it on GPUs, too, and on processors a C++ compiler. Where one is missing a
    run would fail in its first step, on every rank: it is refused before any process starts.
    """,
    bad="echelon train run.toml --set kernels.provider=compiled     # no C++ compiler is installed",
    fixed="echelon train run.toml --set kernels.provider=plain",
)
