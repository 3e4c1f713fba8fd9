# SPDX-License-Identifier: Apache-2.0
"""Names as people write them, and words that users of other tools type.

Names come without case, and with spaces, dashes or nothing between the parts:
`RTX 4090`, `rtx-4090` and `RTX4090` are one name; so are `Llama-3-8B` and `llama3-8b`. The parts
of a name are its letters and its numbers, and only what stands between two of them may differ:
`qwen3-1.7b` is not `qwen3-17b`. A name that could mean several things means none.

A word of another tool may have several meanings. Meanings count if they are known words at its
place: `speed` is an objective behind `--objective`, and nothing in a table of settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

NameParts = tuple[str, ...]
"""A name in words and numbers: ("rtx", "4090")."""


def name_parts(name: str) -> NameParts:
    """Return the letters and numbers of a name in lower case; a slash is kept."""
    return tuple(re.findall(r"\d+(?:\.\d+)*|[^\W\d_]+|/", name.lower()))


def find_name(typed: str, spellings: Mapping[str, str]) -> str | None:
    """Return what a typed name means; None where it means nothing, or several things.

    `spellings` are all names by what each of them means. One that is typed exactly wins.
    """
    if typed in spellings:
        return spellings[typed]
    wanted = name_parts(typed)
    found = {meant for spelt, meant in spellings.items() if name_parts(spelt) == wanted}
    return found.pop() if len(found) == 1 and wanted else None


def names_within(typed: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the known names that begin with all parts of a typed one: of a100, those of 40 GB too.

    They are what a name may mean that is not said to its end, that with no further part first.
    """
    wanted = name_parts(typed)
    found = (name for name in known if wanted and name_parts(name)[: len(wanted)] == wanted)
    return tuple(sorted(found, key=lambda name: len(name_parts(name)) > len(wanted)))


def contains_name(text: str, name: str) -> bool:
    """Return whether the parts of a name stand together in a text: h100, not l4 in L40S."""
    inside, wanted = name_parts(text), name_parts(name)
    starts = range(len(inside) - len(wanted) + 1)
    return bool(wanted) and any(inside[at : at + len(wanted)] == wanted for at in starts)


_OURS: Mapping[str, str] = {
    # settings of run.toml, by the last part of their key, or by the whole of it
    "source": "path dataset datasets file files dir folder train_path train_data data_path corpus",
    "tokenizer": "tokenizer_path tokenizer_name tokenizer_type",
    "validation_fraction": "val_fraction validation_split val_split test_size val_set_size",
    "tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
    "model_parallel tp_size tp_degree",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp_size pp_degree "
    "pipeline_model_parallel_size num_stages",
    "cp": "context_parallel context_parallel_size context_parallel_degree cp_size cp_degree "
    "sequence_parallel_size",
    "ep": "expert_parallel expert_parallel_size expert_model_parallel_size ep_size ep_degree",
    "dp_replicate": "dp ddp data_parallel data_parallel_size replicas dp_size "
    "data_parallel_replicate_degree num_replicas",
    "dp_shard": "fsdp fsdp_size shards data_parallel_shard_degree",
    "stage": "zero zero_stage sharding",
    "global_sequences": "global_batch_size batch_size global_batch train_batch_size gbs "
    "gradient_accumulation_steps gradient_accumulation",
    "microbatch_sequences": "micro_batch_size micro_batch microbatch_size microbatch mbs "
    "per_device_train_batch_size train_micro_batch_size_per_gpu local_batch_size",
    "sequence_length": "seq_len seq_length seqlen max_seq_len max_seq_length block_size context "
    "context_length sequence cutoff_len max_length",
    "learning_rate": "lr max_lr base_lr",
    "warmup_steps": "warmup warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps",
    "clip_norm": "grad_clip clip_grad max_grad_norm gradient_clipping gradient_clip_val",
    "beta1": "betas adam_beta1",
    "beta2": "adam_beta2",
    "eps": "epsilon adam_eps adam_epsilon",
    "schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "final_ratio": "min_lr min_lr_ratio",
    "kind": "optimizer name type optim",
    "layers": "num_layers n_layers n_layer num_hidden_layers depth blocks num_blocks",
    "hidden": "hidden_size d_model n_embd dim width hidden_dim emb_dim",
    "heads": "num_heads n_heads n_head num_attention_heads",
    "kv_heads": "num_key_value_heads n_kv_heads num_kv_heads num_query_groups",
    "ffn": "intermediate_size ffn_hidden_size d_ff ffn_dim mlp_dim",
    "vocab": "vocab_size padded_vocab_size",
    "max_positions": "max_position_embeddings n_positions",
    "num_experts": "num_local_experts n_routed_experts experts moe_num_experts",
    "top_k": "num_experts_per_tok moe_router_topk topk",
    "tied": "tie_word_embeddings tie_embeddings",
    "steps": "max_steps num_steps iterations iters train_iters total_steps max_iters "
    "training_steps",
    "every": "save_every save_interval save_steps interval eval_every",
    "validate_every": "eval_interval eval_steps eval_every val_interval val_check_interval "
    "evaluation_interval",
    "log_every": "log_interval logging_steps log_freq log_steps",
    "trackers": "tracker report_to wandb tensorboard loggers logger",
    "run_name": "name experiment experiment_name job_name",
    "runs_dir": "output_dir out_dir save_dir logdir log_dir output",
    "weights": "init_from checkpoint pretrained pretrained_checkpoint load model_path",
    "seed": "random_seed manual_seed",
    "parameters": "dtype param_dtype precision compute_dtype torch_dtype mixed_precision",
    "reduction": "reduce_dtype grad_reduce_dtype",
    "policy": "activation_checkpointing gradient_checkpointing recompute_granularity "
    "recompute_activations checkpointing ac mode",
    "virtual_stages": "num_virtual_stages virtual_pipeline interleave num_model_chunks vpp",
    "preset": "name gpus devices device gpu",
    # values
    "bf16": "bfloat16 torch.bfloat16 bf16-mixed",
    "fp16": "float16 half torch.float16 16-mixed",
    "fp32": "float32 float single torch.float32 tf32 32-true",
    "fp64": "float64 double torch.float64",
    "adamw": "adam adamw_torch fused_adam fusedadam",
    "full": "all true always uniform block",
    "selective": "selected",
    "none": "off false no null disabled",
    "never": "0 off false no none",
    "host": "cpu ram",
    "nvme": "disk ssd",
    "ulysses": "a2a all-to-all deepspeed-ulysses",
    "ring": "p2p ring-attention",
    "gathered": "allgather all-gather all_gather",
    "interleaved-1f1b": "interleaved interleaved1f1b vpp virtual",
    "dualpipe-v": "dualpipev",
    "zb-h1": "zerobubble zero-bubble zb1p",
    "zb-v": "zbvzerobubble zbv",
    # objectives of a search
    "throughput": "speed fast tokens tokens_per_second tok/s mfu",
    "time": "speed fast latency seconds step_time",
    "cost": "price money dollars cheap cheapest usd",
    "devices": "gpus fewest count ranks",
    "front": "pareto",
    # tools
    "hf": "huggingface hugging hugging_face transformers",
    # commands
    "plan": "search solve",
    "prove": "verify check test",
    "train": "run fit launch start pretrain finetune fine-tune sft",
    "generate": "inference sample infer chat",
    "observe": "report trace profile watch monitor logs",
    "doctor": "env check status info",
    "rehearse": "simulate dryrun dry-run",
    "demo": "tutorial quickstart example",
    "init": "new create",
    "calibrate": "bench benchmark measure",
    "config presets": "presets models clusters list",
    "config show": "show settings",
    "export": "convert",
    "import": "convert from",
    "compare": "diff",
    "data prepare": "prepare tokenize preprocess",
    "--help": "-? --usage",
}
"""Other words for each of ours."""


def _meanings() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for ours, others in _OURS.items():
        for other in others.split():
            found[other] = (*found.get(other, ()), ours)
    return found


SYNONYMS: Mapping[str, tuple[str, ...]] = _meanings()
"""Our words for each word of other tools, in lower case."""
