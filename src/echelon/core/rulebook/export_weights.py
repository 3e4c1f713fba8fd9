# SPDX-License-Identifier: Apache-2.0
"""Rules about trained weights that leave for another library."""

from echelon.core.rules import Rule

WEIGHTS_HAVE_ARCHITECTURE = Rule(
    id="weights-have-architecture",
    why="""
    Hugging Face's folder names an architecture, and says the model in its keys. One is taken only
    where the keys, read back, give the same shape: a model that none of them can say would compute
    something else there, and is refused with what would differ in the nearest one. What only says
    how a model was trained (dropout) is not compared. --to echelon takes every model.
    """,
    bad="echelon export weights runs/capped --out capped     # model.soft_cap = 30.0",
    fixed="echelon export weights runs/capped --to echelon --out capped",
)

WEIGHTS_TYPE_NAMES_SHAPE = Rule(
    id="weights-type-names-shape",
    why="""
    A model_type that is asked for is one that Echelon writes, and has the parts of the model:
    experts where it has experts, latent attention where it has that.
    """,
    bad="echelon export weights runs/nano --model-type bert --out nano-bert",
    fixed="echelon export weights runs/nano --model-type llama --out nano-llama",
)

WEIGHTS_HAVE_NAMES = Rule(
    id="weights-have-names",
    why="""
    A trainer has its own names for the weights of the models that it builds: torchtitan for Llama 3
    and Qwen 3, Megatron-core for a GPTModel without experts. A model with a part that has no name
    there could not be loaded, and is refused with the names of what is left over. DeepSpeed wraps
    any module, --to dcp --model-type ... writes the names of transformers, and --to echelon those
    of Echelon, which every model has.
    """,
    bad="echelon export weights runs/gpt2 --to dcp --out gpt2     # learned positions",
    fixed="echelon export weights runs/gpt2 --to dcp --model-type gpt2 --out gpt2",
)

WEIGHTS_RANKS_DIVIDE = Rule(
    id="weights-ranks-divide",
    why="""
    The older folders of Megatron-core have a file for each tensor rank and stage. Tensor ranks
    share out key/value heads, the width of the MLP and words, padded to 128 for each of them;
    stages share out layers. All must be able to: --to megatron writes a folder without a layout,
    which any number of ranks reads.
    """,
    bad="echelon export weights runs/nano --to megatron-legacy --tp 4 --out m     # 2 kv heads",
    fixed="echelon export weights runs/nano --to megatron --out m",
)

EXPORT_ADAPTERS = Rule(
    id="export-adapters",
    why="""
    PEFT keeps the two matrices of an adapter by the name of the layer that they stand beside. A run
    that trained all weights has none apart; and where an architecture has several of our layers in
    one (c_attn of GPT-2 is q, k and v), adapters of these are none of it. Without --adapters they
    are merged into the weights, which every architecture can hold.
    """,
    bad="echelon export weights runs/gpt2-lora --out adapters --adapters",
    fixed="echelon export weights runs/gpt2-lora --out merged",
)
