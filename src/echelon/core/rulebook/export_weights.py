"""Rules about trained weights that leave for another library."""

from echelon.core.rules import Rule

WEIGHTS_HAVE_ARCHITECTURE = Rule(
    id="weights-have-architecture",
    why="""
    Hugging Face's folder names an architecture, and says the model in its keys. One is taken only
    where the keys, read back, give the same shape: a model that none of them can say would compute
    something else there, and is refused with what would differ in the nearest one. What only says
    how a model was trained (dropout) is not compared.
    """,
    bad="echelon export weights runs/capped --out capped     # model.soft_cap = 30.0",
    fixed="echelon export weights runs/plain --out plain     # a shape of Llama, Qwen, Mixtral ...",
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
