"""The small Llama of the Megatron-core programs: its truth, and what each weight is in it.

Needs megatron-core and transformers (tried with 0.16 and 5.23).
"""

import sys
from pathlib import Path

import torch
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
from transformers import LlamaConfig, LlamaForCausalLM

import echelon as ec

VOCAB, LENGTH, SEQUENCES, MICROBATCHES = 48, 16, 8, 2
HIDDEN, FFN, LAYERS, HEADS, GROUPS = 32, 48, 2, 4, 2
CLIP_NORM, RATE = 0.5, 1e-3


def names_of(case: ec.VerifyCase) -> dict[str, str | ec.Logical | ec.Fused]:
    """Return what Megatron's fused and split weights are in the Llama of transformers."""
    tp = case.degrees.get("tp", 1)
    axis = "tp" if tp > 1 else None

    def split(name: str, dim: int = 0) -> ec.Logical:
        return ec.Logical(name=name, dim=dim, axis=axis)

    def fused(*names: str, groups: int = 1) -> ec.Fused:
        return ec.Fused(parts=tuple(split(name) for name in names), groups=groups)

    mine, truth = "decoder.layers.{layer}", "model.layers.{layer}"
    qkv = (f"{truth}.self_attn.{part}_proj.weight" for part in "qkv")
    return {
        "embedding.word_embeddings.weight": split("model.embed_tokens.weight"),
        f"{mine}.input_layernorm.weight": f"{truth}.input_layernorm.weight",
        # Queries, keys and values of one key head stand together.
        f"{mine}.self_attention.linear_qkv.weight": fused(*qkv, groups=GROUPS // tp),
        f"{mine}.self_attention.linear_proj.weight": split(f"{truth}.self_attn.o_proj.weight", 1),
        f"{mine}.pre_mlp_layernorm.weight": f"{truth}.post_attention_layernorm.weight",
        f"{mine}.mlp.linear_fc1.weight": fused(
            f"{truth}.mlp.gate_proj.weight", f"{truth}.mlp.up_proj.weight"
        ),
        f"{mine}.mlp.linear_fc2.weight": split(f"{truth}.mlp.down_proj.weight", 1),
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": split("lm_head.weight"),
    }


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs_BT and labels_BT of one step."""
    made = torch.Generator().manual_seed(1000 + step)
    tokens_BT = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=made)
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def one_device(case: ec.VerifyCase) -> ec.OneDevice:
    """Train the Llama of transformers on one device."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).to(case.dtype)

    def loss(step: int) -> torch.Tensor:
        inputs_BT, labels_BT = batch(step)
        logits_BTV = model(input_ids=inputs_BT).logits
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    return ec.OneDevice(model=model, loss=loss, optimizer=optimizer, clip_norm=CLIP_NORM)


def gpt(case: ec.VerifyCase) -> tuple[TransformerConfig, GPTModel]:
    """Return Megatron's part of the model on this rank, and its configuration."""
    tp, pp = case.degrees.get("tp", 1), case.degrees.get("pp", 1)
    if not torch.cuda.is_available():
        # Megatron-core has no CPU mode: the bench's stand-ins for `torch.cuda` are used.
        sys.path.append(str(Path(__file__).resolve().parents[2]))
        from bench.peers.megatron_cpu import pretend_cuda

        pretend_cuda()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return config, model


def train(case: ec.VerifyCase, distributed_optimizer: bool = False) -> ec.OnRank:
    """Train by Megatron's schedule, DDP and optimizer."""
    config, bare = gpt(case)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer), bare
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=RATE,
        weight_decay=0.01,
        adam_beta1=0.9,
        adam_beta2=0.999,
        clip_grad=CLIP_NORM,
        use_distributed_optimizer=distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    run_schedule = get_forward_backward_func()
    dp_rank, dp = case.mesh.get("dp", 0), case.degrees.get("dp", 1)
    positions_1T = torch.arange(LENGTH).unsqueeze(0)
    masked = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]

    def forward(parts, module):
        inputs_BT, labels_BT = next(parts)
        out = module(inputs_BT, positions_1T.expand(len(inputs_BT), -1), masked, labels=labels_BT)
        return out, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    def step(number: int) -> dict[str, float | None]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        inputs_BT, labels_BT = (x.chunk(dp)[dp_rank].chunk(MICROBATCHES) for x in batch(number))
        told = run_schedule(
            forward_step_func=forward,
            data_iterator=iter(list(zip(inputs_BT, labels_BT, strict=True))),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=SEQUENCES // dp // MICROBATCHES,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        loss = sum(float(one["loss"]) for one in told) / len(told) if told else None
        return {"loss": loss, "grad_norm": norm}

    return ec.OnRank(
        model=model,
        step=step,
        optimizer=optimizer,
        names=names_of(case),
        copy_initial=True,
    )
