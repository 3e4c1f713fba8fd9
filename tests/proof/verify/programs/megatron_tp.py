"""Megatron-core: GPTModel over tensor ranks, or replicas with its distributed optimizer."""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

import echelon as ec
from bench.peers.megatron_cpu import pretend_cuda

pretend_cuda()
MESH = {"dp": 1, "tp": 2}
FLOAT64 = False
SHARED_STATE, SEQUENCE, CLIP = False, False, 0.5
VOCAB, WIDTH, HEADS, LAYERS, ROWS, LENGTH = 32, 16, 4, 2, 4, 8


def built(tp):
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        ffn_hidden_size=24,
        num_attention_heads=HEADS,
        num_query_groups=2,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        sequence_parallel=SEQUENCE and tp > 1,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    return config, gpt


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def joined(tp):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def token_losses(model, ids, labels):
    positions = torch.arange(LENGTH).expand(ids.shape[0], -1)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return model(ids, positions, mask, labels=labels)


def one_device(case):
    if not parallel_state.model_parallel_is_initialized():
        joined(1)
    torch.manual_seed(case.seed)
    _, model = built(1)
    model = model.to(case.dtype)
    return ec.OneDevice(
        model=model,
        loss=lambda step: token_losses(model, *batch(step)).mean(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-8, weight_decay=0.1),
        clip_norm=CLIP,
    )


def on_rank(case):
    tp, dp = case.degrees["tp"], case.degrees["dp"]
    joined(tp)
    config, gpt = built(tp)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=SHARED_STATE),
        gpt,
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.1,
        adam_beta2=0.999,
        clip_grad=CLIP,
        use_distributed_optimizer=SHARED_STATE,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads
    forward_backward = get_forward_backward_func()

    def forward(batches, module):
        losses = token_losses(module, *next(batches))
        return losses, lambda one: (one.mean(), {"loss": one.mean().detach()})

    def step(number):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        mine = tuple(rows.chunk(dp)[case.mesh["dp"]] for rows in batch(number))
        losses = forward_backward(
            forward_step_func=forward,
            data_iterator=iter([mine]),
            model=[model],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=ROWS // dp,
            forward_only=False,
        )
        optimizer.step()
        return losses[0]["loss"]

    return ec.OnRank(model=model, optimizer=optimizer, step=step, copy_initial=True)
