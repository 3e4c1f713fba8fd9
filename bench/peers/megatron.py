"""megatron-core 0.16: GPTModel with its pure-torch ("local") layers, its DDP and its schedules.

megatron-core has no CPU mode; the `torch.cuda` entry points that it calls on the way are replaced
by `megatron_cpu.py`, from outside. Its weights are its own, so its losses differ from the others'.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.harness.data import rank_batch
from bench.harness.spec import Settings, StepFunction
from bench.peers.llama import join
from bench.peers.megatron_cpu import pretend_cuda

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def _config(settings: Settings) -> Any:
    from megatron.core.transformer import TransformerConfig

    size, mode = settings.size, settings.mode
    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.ffn,
        num_attention_heads=size.heads,
        num_query_groups=size.kv_heads,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        tensor_model_parallel_size=mode.tp,
        pipeline_model_parallel_size=mode.pp,
        sequence_parallel=mode.sequence_parallel,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=False,
    )


def _model(settings: Settings, config: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=settings.size.vocab,
        max_sequence_length=settings.size.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    overlap = "overlap" in settings.variant
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=_shares_state(settings),
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and _shares_state(settings),
    )
    return DistributedDataParallel(config, ddp, gpt)


def _shares_state(settings: Settings) -> bool:
    """Return whether Megatron's distributed optimizer (ZeRO-1) is asked for."""
    return "zero1" in settings.variant


def _optimizer(settings: Settings, model: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta2=0.999,
        clip_grad=0.0,
        use_distributed_optimizer=_shares_state(settings),
        overlap_param_gather="overlap" in settings.variant and _shares_state(settings),
    )
    return get_megatron_optimizer(config, [model])


def _forward(settings: Settings) -> Callable[[Batches, Any], tuple[torch.Tensor, Any]]:
    length = settings.size.sequence
    positions = torch.arange(length).unsqueeze(0)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]

    def forward(batches: Batches, module: Any) -> tuple[torch.Tensor, Any]:
        inputs, labels = next(batches)
        out = module(inputs, positions.expand(inputs.shape[0], -1), mask, labels=labels)
        return out, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    return forward


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank of dp x tp x pp.

    Variants, together or alone: "zero1" shares out the optimizer state, "overlap" overlaps what is
    sent over data ranks with forward and backward.
    """
    pretend_cuda()
    join(settings)
    mode = settings.mode
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mode.tp, pipeline_model_parallel_size=mode.pp
    )
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(settings.seed)
    config = _config(settings)
    model = _model(settings, config)
    optimizer = _optimizer(settings, model)
    config.finalize_model_grads_func = finalize_model_grads
    forward_backward = get_forward_backward_func()
    forward = _forward(settings)
    dp_rank = parallel_state.get_data_parallel_rank()
    count = mode.microbatches

    def step(number: int) -> float | None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        inputs, labels = rank_batch(settings, number, dp_rank, mode.dp)
        batches = iter(list(zip(inputs.chunk(count), labels.chunk(count), strict=True)))
        losses = forward_backward(
            forward_step_func=forward,
            data_iterator=batches,
            model=[model],
            num_microbatches=count,
            seq_length=settings.size.sequence,
            micro_batch_size=inputs.shape[0] // count,
            forward_only=False,
        )
        optimizer.step()
        return sum(float(entry["loss"]) for entry in losses) / len(losses) if losses else None

    return step
