# SPDX-License-Identifier: Apache-2.0
"""Rules about files of weights: weights of a start, adapters, exported weights."""

from echelon.core.rules import Area, Rule

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


ADAPTERS_AREA = Area("adapters")
"""Files of adapters that a run starts from."""

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


LORA_AREA = Area("lora")
"""Adapters that are trained over a frozen model."""

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
    Islands of local SGD and parameter servers exchange all parameters of a model, of which adapters
    are a small part. With adapters replicas sum gradients in each step: that is all of the
    adapters, and little.
    """,
    example="""
    [mesh]
    dp_replicate = 2
    [lora]
    rank = 16
    [servers]
    %s
    """,
    bad="count = 1",
    fixed="count = 0",
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


EXPORT_WEIGHTS_AREA = Area("export_weights")
"""Trained weights that leave for another library."""

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
