# SPDX-License-Identifier: Apache-2.0
"""Rules about files of weights that a run starts from."""

from echelon.core.rules import Rule

WEIGHTS_FILE_EXISTS = Rule(
    id="weights-file-exists",
    why="""
    train.weights is a safetensors file, an index of several (model.safetensors.index.json), or the
    folder that holds one or the other; or the checkpoint of a trainer: a folder of
    torch.distributed.checkpoint (torchtitan, FSDP2, Megatron-core), of DeepSpeed, or the older one
    of Megatron-core. All files that an index names must be there, and the save that a file such as
    `latest` points to. Single files of pickled weights (.bin, .pt) are not read. A checkpoint of
    Echelon is for --resume, which goes on with its optimizer state and its samples too.
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

WEIGHTS_RANKS_COMPLETE = Rule(
    id="weights-ranks-complete",
    why="""
    Each rank of a trainer writes a file of its own, and the weights are whole only with all of
    them: the parts that data ranks keep of flat buffers (DeepSpeed), the shards of tensor ranks and
    the layers of stages (Megatron-core), a folder for each parameter (universal). A save that a
    kill cut short lacks some, as does a folder that was copied from one node of several.
    """,
    bad="--set train.weights=ds     # of zero_pp_rank_0 and _1 only the first was copied",
    fixed="--set train.weights=ds     # with the files of all ranks",
)

WEIGHTS_TRAINER_KNOWN = Rule(
    id="weights-trainer-known",
    why="""
    A module that DeepSpeed cut over tensor ranks, or into stages of its pipeline engine, is saved
    in pieces, and no file says how they were cut. Its own converter knows: ds_to_universal.
    """,
    bad="--set train.weights=ds     # mp_rank_00 and mp_rank_01",
    fixed="python -m deepspeed.checkpoint.ds_to_universal --input_folder ds --output_folder u",
)

WEIGHTS_OPTIMIZER = Rule(
    id="weights-optimizer",
    why="""
    With train.weights_optimizer a run goes on where a trainer stopped: with the moments of AdamW
    of each weight, and from the step that it had made. All of that must be in its checkpoint
    (DeepSpeed, ZeRO or universal; torch.distributed.checkpoint with optimizer.state.NAME.exp_avg),
    fewer steps than train.steps, and one optimizer that all ranks share: no parameter servers, no
    islands of local SGD. Adapters of LoRA begin anew.
    """,
    bad="--set train.weights=llama --set train.weights_optimizer=true     # safetensors alone",
    fixed="--set train.weights=ds --set train.weights_optimizer=true     # a folder of DeepSpeed",
)
