"""Rules about files of weights that a run starts from."""

from echelon.core.rules import Rule

WEIGHTS_FILE_EXISTS = Rule(
    id="weights-file-exists",
    why="""
    train.weights is a safetensors file, an index of several (model.safetensors.index.json), or the
    folder that holds one or the other. All files that an index names must be there. Pickled weights
    (.bin, .pt) are not read: to open one is to run what is in it. A checkpoint of Echelon is for
    --resume, which goes on with its optimizer state and its samples too.
    """,
    bad="--set train.weights=llama     # the folder holds only pytorch_model.bin",
    fixed="--set train.weights=llama     # the folder holds model.safetensors",
)

WEIGHTS_FILE_READABLE = Rule(
    id="weights-file-readable",
    why="""
    A safetensors file begins with a header that says where each tensor lies. It is checked, with
    the size of the file, before any rank starts: a download that stopped half-way is the usual
    reason, a pointer of Git LFS in place of the file the next.
    """,
    bad="a model.safetensors of 134 bytes",
    fixed="git lfs pull     # or download the file again",
)

WEIGHTS_COMPLETE = Rule(
    id="weights-complete",
    why="""
    Every parameter of the model has a value in the file, under the name that one of the families
    that are read has in transformers, or under Echelon's own.
    Nothing is left at its first value in silence, but biases of routers, which may be absent.
    """,
    bad="--set train.weights=llama-1b --set model.layers=24     # the file has 16 blocks",
    fixed="--set train.weights=llama-1b --set model.hf_config=llama-1b/config.json",
)

WEIGHTS_KNOWN = Rule(
    id="weights-known",
    why="""
    Every tensor of the file is a parameter of the model. One that has no place here belongs to
    another model: it would compute something else without it.
    """,
    bad="weights with attention biases for a model without (model.qkv_bias = false)",
    fixed="--set model.hf_config=DIR/config.json     # the shape that belongs to the weights",
)

WEIGHTS_SHAPE = Rule(
    id="weights-shape",
    why="A tensor of the file has the shape that the model gives it; none is cut or padded.",
    bad="--set train.weights=llama-1b --set model.hidden=1024     # the file has 2048",
    fixed="--set train.weights=llama-1b --set model.hf_config=llama-1b/config.json",
)

WEIGHTS_DTYPE = Rule(
    id="weights-dtype",
    why="""
    Weights are read from float32, float64, bfloat16 or float16 and become the master dtype of the
    run. Quantized values mean nothing without the scales of their format.
    """,
    bad="weights in float8 or packed 4-bit integers",
    fixed="the weights that these were quantized from",
)

WEIGHTS_FINITE = Rule(
    id="weights-finite",
    why="""
    A weight that is infinite or no number spoils the first loss. It is in the file, or it was too
    large for the dtype of the run: float16 ends at 65504.
    """,
    bad='float32 weights above 65504 with precision.master = "fp16"',
    fixed='precision.master = "fp32"',
)

WEIGHTS_TIED_HEAD = Rule(
    id="weights-tied-head",
    why="""
    With model.tied the head is the embedding. A file may hold both all the same, if they are equal;
    where they differ the model that was saved was not tied.
    """,
    bad="--set model.tied=true     # and lm_head.weight differs from the embedding",
    fixed="--set model.tied=false",
)

WEIGHTS_POSITIONS = Rule(
    id="weights-positions",
    why="""
    A config.json beside weights says how their rotary positions turn. Weights that were trained on
    with YaRN (DeepSeek-V3) expect its frequencies, and its factor on attention scores, at every
    position: with plain ones they would load, and compute something else. Plain and Llama 3
    positions are computed, others are not.
    """,
    bad='{"rope_scaling": {"type": "yarn", "factor": 40, ...}, ...}     # in the folder of weights',
    fixed="weights from before the extension, with their own config.json; or none, from a seed",
)
