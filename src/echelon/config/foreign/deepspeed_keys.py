"""Keys of a DeepSpeed JSON that set nothing here: without need, or honoured with one value only."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.foreign.ledger import COUNT, FLAG, FROM_ZERO, NUMBER
from echelon.config.kinds import Kind, Text

SECTIONS = (
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "activation_checkpointing",
    "bf16",
    "bfloat16",
    "fp16",
    "checkpoint",
    "checkpoint.parallel_write",
    "compile",
    "data_types",
    "optimizer",
    "optimizer.params",
    "pipeline",
    "scheduler",
    "scheduler.params",
    "tensor_parallel",
)

NOT_NEEDED: Mapping[str, tuple[Kind, str]] = {
    "checkpoint.parallel_write.pipeline_stage": (FLAG, "every rank writes its own part"),
    "checkpoint.tag_validation": (Text(), "ranks agree on the step before a checkpoint counts"),
    "checkpoint.use_node_local_storage": (FLAG, "a checkpoint is one folder that all ranks reach"),
    "dataloader_drop_last": (FLAG, "every batch is whole: its samples follow from the step"),
    "checkpoint.checkpoint_serialization": (FLAG, "tensors are stored as they are"),
    "disable_python_gc": (FLAG, "no setting: it changes no number"),
    "dump_state": (FLAG, "plan.json and environment.json are in every run folder"),
    "log_level": (Text(), "messages are few and all shown"),
    "managed_gradient_accumulation": (FLAG, "a step is always all microbatches of a batch"),
    "memory_breakdown": (FLAG, "echelon plan shows the bytes that each rank holds"),
    "pipeline.grad_partitioned": (FLAG, "gradients of activations are sent as the ranks hold them"),
    "pipeline.pipe_partitioned": (FLAG, "activations are sent as the ranks hold them"),
    "pipeline.seed_layers": (FLAG, "first weights follow from the seed and each weight's name"),
    "seq_parallel_comm_data_type": (Text(), "gradients have one dtype on all wires"),
    "seq_parallel_communication_data_type": (Text(), "gradients have one dtype on all wires"),
    "tensor_parallel.tp_overlap_comm": (FLAG, "always so: backward sends while it computes"),
    "vocabulary_size": (COUNT, "it only warned about sizes; the model has the vocabulary"),
    "wall_clock_breakdown": (FLAG, "events of a run hold the time of every action"),
    "tensor_parallel.preset_model": (Text(), "which matrices are cut follows from the model"),
    "zero_allow_untested_optimizer": (FLAG, "every optimizer runs at every stage"),
    "zero_force_ds_cpu_optimizer": (FLAG, "offloaded slices are updated by the one optimizer"),
    "zero_optimization.allgather_bucket_size": (
        FROM_ZERO,
        "parameters are gathered in place, bucket by bucket, into no other buffer",
    ),
    "zero_optimization.allgather_partitions": (FLAG, "parameters are always all-gathered"),
    "zero_optimization.compute_grad_norm": (FLAG, "the norm is on every step line"),
    "zero_optimization.contiguous_gradients": (
        FLAG,
        "always so: gradients are views into flat buckets (it never concerned parameters)",
    ),
    "zero_optimization.elastic_checkpoint": (FLAG, "every checkpoint is read under any split"),
    "zero_optimization.enable_sanity_checks": (FLAG, "echelon prove checks every tensor"),
    "zero_optimization.ignore_unused_parameters": (FLAG, "every parameter of the model is used"),
    "zero_optimization.legacy_stage1": (FLAG, "one engine for all stages"),
    "zero_optimization.load_from_fp32_weights": (FLAG, "a checkpoint holds the master weights"),
    "zero_optimization.log_trace_cache_warnings": (FLAG, "no trace: the order is in the plan"),
    "zero_optimization.memory_efficient_linear": (FLAG, "no linear layer saves its weight"),
    "zero_optimization.override_module_apply": (FLAG, "each rank makes its own slices only"),
    "zero_optimization.overlap_comm": (FLAG, "a full bucket is always reduced during backward"),
    "zero_optimization.parameter_alignment": (FLAG, "buckets are padded to equal slices"),
    "zero_optimization.pipeline_loading_checkpoint": (FLAG, "each rank reads its slices only"),
    "zero_optimization.reduce_scatter": (FLAG, "a slice is always reduced where it is kept"),
    "zero_optimization.round_robin_gradients": (FLAG, "every bucket is cut over all ranks evenly"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (
        FLAG,
        "momentum rests where the other optimizer state does",
    ),
    "zero_optimization.stage3_allgather_sequential": (FLAG, "a unit is gathered in place"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        FLAG,
        "a checkpoint holds whole tensors by name, whatever the split",
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        FLAG,
        "a checkpoint holds whole tensors by name, whatever the split",
    ),
    "zero_optimization.stage3_module_granularity_threshold": (
        FROM_ZERO,
        "a unit is zero.unit_blocks whole blocks, never a part of one",
    ),
    "zero_optimization.stage3_partition_stream_chunk_size": (
        FROM_ZERO,
        "each rank makes its own slices only",
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (FLAG, "a unit is all-gathered"),
    "zero_optimization.sub_group_size": (NUMBER, "the optimizer updates bucket by bucket"),
    "zero_optimization.use_multi_rank_bucket_allreduce": (FLAG, "a bucket is one reduce-scatter"),
}
"""Keys whose value cannot change what is trained, what it takes, and why."""

ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "checkpoint.load_universal": ((False,), "checkpoints of DeepSpeed are not read"),
    "data_types.buffer_dtype": ((), "the tables of rotary positions have the parameters' dtype"),
    "data_types.keep_in_fp32_modules": (("auto",), "which parts compute in fp32 is fixed"),
    "data_types.param_dtype": ((), "bf16 and fp16 say the dtype of parameters"),
    "disable_allgather": ((False,), "updated parameters are always gathered"),
    "gradient_allreduce_op": (("mean",), "the loss is a mean over all tokens of the batch"),
    "gradient_predivide_factor": ((1, 1.0), "gradients are divided once, by the token count"),
    "pipeline.activation_checkpoint_interval": ((0,), "recompute.policy says what is redone"),
    "prescale_gradients": ((False,), "gradients are divided once, by the token count"),
    "sparse_gradients": ((False,), "gradients of embeddings are dense"),
    "use_data_before_expert_parallelism": ((False,), "experts are folded over the data ranks"),
    "zero_optimization.mics_hierarchical_params_gather": (
        (False,),
        "a gather is one collective over the ranks that share out",
    ),
    "zero_optimization.stage3_model_persistence_threshold": (
        (2**63 - 1,),
        "the sum of what is kept whole has no bound; zero.keep_whole_below bounds each",
    ),
    "zero_optimization.zero_hpz_partition_size": (
        (0, 1),
        "there is no second copy of parameters in a node; mesh.dp_replicate cuts groups",
    ),
    "zero_optimization.zero_quantized_gradients": (
        (False,),
        "gradients are sent in precision.reduction, not quantised",
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": (
        (False,),
        "parameters are never quantised",
    ),
    "zero_optimization.zero_quantized_weights": (
        (False,),
        "parameters are sent in precision.parameters, not quantised",
    ),
}
"""Keys that are honoured with these values only, and why."""

NOT_NEEDED_TABLES: Mapping[str, str] = {
    "checkpoint.writer": "every rank writes its own files, and they are flushed before they count",
    "aio": "files of an offload are read ahead and written behind by buffers of a bucket",
    "comms_logger": "events of a run hold every collective with its bytes",
    "csv_monitor": "events.jsonl of a run folder has a line for every step",
    "flops_profiler": "every step line has its tokens per second",
    "timers": "events of a run hold the time of every action",
    "zero_optimization.leaf_module": "a unit is zero.unit_blocks whole blocks",
}
"""Tables that set nothing here, whatever they say."""

OFF_TABLES: Mapping[str, tuple[str, str]] = {
    "amp": ("enabled", "Apex is not used; bf16 and fp16 say the precision"),
    "autotuning": ("enabled", "echelon plan says what fits before anything runs"),
    "comet": ("enabled", "there is no mirror to Comet; a run folder has everything"),
    "compile": ("deepcompile", "no compiler rewrites the collectives"),
    "curriculum_learning": ("enabled", "every batch has batch.sequence_length"),
    "data_efficiency": ("enabled", "the samples of a step follow from the seed alone"),
    "eigenvalue": ("enabled", "weights are not quantised"),
    "elasticity": ("enabled", "a run has one batch size; its checkpoints fit any split"),
    "hybrid_engine": ("enabled", "there is no engine for inference"),
    "nebula": ("enabled", "checkpoints are folders of safetensors"),
    "progressive_layer_drop": ("enabled", "every layer runs in every step"),
    "quantize_training": ("enabled", "weights are not quantised"),
    "tensorboard": ("enabled", "there is no mirror to TensorBoard; a run folder has everything"),
    "torch_autocast": ("enabled", "precision has a dtype for every role; nothing is autocast"),
    "wandb": ("enabled", "there is no mirror to W&B; a run folder has everything"),
}
"""Features that are not here: the key that switches each on, and why it is refused."""

REFUSED_TABLES: Mapping[str, str] = {
    "compression_training": "weights are neither quantised nor pruned",
    "datastates_ckpt": "checkpoints are folders of safetensors, written by every rank",
    "sparse_attention": "a query meets all keys of its window",
    "tensor_parallel.partition_config": "which matrices are cut, and how, follows from the model",
    "weight_quantization": "weights are not quantised",
    "zero_optimization.zenflow": "every gradient is used in the step that made it",
    "zero_optimization.zeropp_loco_param": "gradients are not quantised",
}
"""Features that are not here, and are on as soon as their table says anything."""
