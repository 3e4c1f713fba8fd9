"""torchtitan's Llama 3 and its `parallelize_llama`: tensor + sequence parallelism, FSDP2.

Needs torchtitan (tried with 0.3) and, on a CPU, triton beside it, which it imports.
"""

import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as fn

import echelon as ec

# Where `bench/setup_peers.sh` puts triton: beside the environment, so that torch does not see it.
sys.path.append(str(Path(sys.prefix).parent / "triton"))

import torchtitan.tools.utils as titan

# torchtitan takes "cuda" where it finds no accelerator, and all else reads it from here.
titan.device_type, titan.device_module = "cpu", torch.cpu

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.parallelize import parallelize_llama  # noqa: E402

MESH = {"dp": 2, "tp": 2}
FLOAT64 = False  # its rotary embedding is complex64
VOCAB, LENGTH, SEQUENCES, HIDDEN = 48, 16, 4, 32
RATE = 1e-3


def training_config() -> TrainingConfig:
    """Return torchtitan's settings of a run, in fp32 throughout."""
    training = TrainingConfig(local_batch_size=SEQUENCES // MESH["dp"], seq_len=LENGTH, steps=100)
    training.mixed_precision_param = training.mixed_precision_reduce = "float32"
    return training


def build(parallelism: ParallelismConfig) -> Any:
    """Return the model on no device yet, with attention that trains on a CPU."""
    llama3.get_attention_config = lambda *_, **__: ScaledDotProductAttention.Config()
    rope = ComplexRoPE.Config(dim=8, max_seq_len=LENGTH, theta=10000, scaling="none")
    config = llama3.Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=HIDDEN,
            out_features=VOCAB,
            param_init=llama3._output_linear_init(HIDDEN),
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=False,
            n_layers=2,
            dim=HIDDEN,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=48,
            attn_backend="sdpa",
            rope=rope,
        ),
    )
    training = training_config()
    config.update_from_config(
        config=types.SimpleNamespace(parallelism=parallelism, training=training, debug=None)
    )
    with torch.device("meta"):
        return config.build()


def initialised(model: Any) -> Any:
    """Return the model on the CPU with torchtitan's own first weights."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    return model.train()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs_BT and labels_BT of one step."""
    made = torch.Generator().manual_seed(1000 + step)
    tokens_BT = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=made)
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def loss_of(model: Any, inputs_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    positions_BT = torch.arange(LENGTH).unsqueeze(0).expand(len(inputs_BT), -1)
    logits = model(inputs_BT, positions=positions_BT)
    logits_BTV = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return fn.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train torchtitan's model as it is, unsplit."""
    model = initialised(build(ParallelismConfig(spmd_backend="partial_dtensor")))

    def loss(step: int) -> torch.Tensor:
        return loss_of(model, *batch(step))

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer)


def on_rank(case: ec.VerifyCase) -> ec.OnRank:
    """Train torchtitan's split model in a loop of ours."""
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=MESH["dp"],
        tensor_parallel_degree=MESH["tp"],
        spmd_backend="partial_dtensor",
    )
    model = parallelize_llama(
        build(parallelism),
        parallel_dims=ParallelDims.from_config(parallelism, case.world_size),
        training=training_config(),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder=tempfile.gettempdir(),
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gloo has no sum that divides on the way; torchtitan divides the loss itself.
            module.set_force_sum_reduction_for_comms(True)
    initialised(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, foreach=False)

    def step(number: int) -> torch.Tensor:
        rows = (x.chunk(MESH["dp"])[case.mesh["dp"]] for x in batch(number))
        loss = loss_of(model, *rows)
        (loss / MESH["dp"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ec.OnRank(model=model, step=step, optimizer=optimizer, copy_initial=True)
