"""Keys of a torchtitan configuration that set nothing here, and the models that its flavors are."""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS = (
    "job",
    "profiling",
    "metrics",
    "model",
    "optimizer",
    "lr_scheduler",
    "training",
    "parallelism",
    "checkpoint",
    "activation_checkpoint",
    "compile",
    "comm",
    "debug",
    "experimental",
    "fault_tolerance",
    "float8",
    "liger_kernel",
    "memory_estimation",
    "mx",
    "quantize",
    "validation",
)

MODELS: Mapping[tuple[str, str], str] = {
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3.1-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
}
"""The preset that each model and flavor is."""

SCHEDULES: Mapping[str, str] = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "breadth-first",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
ONE_STAGE = ("1f1b", "gpipe")
"""Schedules with one stage on a rank; torchtitan puts two on it with all others."""

EVERYTHING = "a run folder has every number of every step"
FUSED = "operations are fused where the device can"

NOT_NEEDED: Mapping[str, str] = {
    "checkpoint.async_mode": "no setting: it changes no number",
    "checkpoint.enable_first_step_checkpoint": "the last step always has a checkpoint",
    "checkpoint.exclude_from_loading": "no checkpoint of torchtitan is read",
    "checkpoint.export_dtype": "a checkpoint holds the master weights",
    "checkpoint.folder": "checkpoints are in the run folder: train.runs_dir",
    "checkpoint.initial_load_in_hf": "no checkpoint of torchtitan is read",
    "checkpoint.initial_load_model_only": "no checkpoint of torchtitan is read",
    "checkpoint.last_save_in_hf": "checkpoints are folders of safetensors",
    "checkpoint.last_save_model_only": "a checkpoint holds all that a run needs to go on",
    "checkpoint.load_step": "echelon train --resume goes on with the last one",
    "metrics.disable_color_printing": "colors are for terminals only",
    "metrics.enable_tensorboard": EVERYTHING,
    "metrics.enable_wandb": EVERYTHING,
    "metrics.save_for_all_ranks": EVERYTHING,
    "metrics.save_tb_folder": EVERYTHING,
    "model.hf_assets_path": "data.tokenizer says it; prepared data has its own",
    "model.print_after_conversion": "no module is converted",
    "model.tokenizer_path": "data.tokenizer says it; prepared data has its own",
    "optimizer.implementation": "one fused call per bucket",
    "parallelism.enable_async_tensor_parallel": "always so: what is sent overlaps computation",
    "training.compile": FUSED,
    "training.dataset": "data.source says what is read",
    "training.dataset_path": "data.source says what is read",
    "training.gc_debug": "no setting: it changes no number",
    "training.gc_freq": "no setting: it changes no number",
    "validation.dataset": "data.validation_fraction holds tokens out",
    "validation.dataset_path": "data.validation_fraction holds tokens out",
    "validation.local_batch_size": "a validation reads global batches",
    "validation.seq_len": "a validation reads global batches",
}

ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "checkpoint.create_seed_checkpoint": ((False,), "first weights follow from the seed"),
    "checkpoint.initial_load_path": (("",), "checkpoints of torchtitan are not read"),
    "debug.deterministic": ((False,), "there is no switch for the kernels of a GPU"),
    "experimental.custom_args_module": (("",), "keys of a module of yours are not known here"),
    "experimental.custom_import": (("",), "models are presets or settings, not modules"),
    "job.custom_config_module": (("",), "keys of a module of yours are not known here"),
    "memory_estimation.enabled": ((False,), "echelon plan shows the bytes that each rank holds"),
    "model.converters": (([], ""), "nothing is computed in 8 bits, and no module is swapped"),
    "optimizer.early_step_in_backward": ((False,), "an update waits for all gradients"),
    "parallelism.disable_loss_parallel": ((False,), "the loss is over a cut vocabulary"),
    "parallelism.enable_compiled_autograd": ((False,), "backward is not compiled"),
    "parallelism.pipeline_parallel_schedule_csv": (("",), "--set pipeline.file=FILE reads one"),
    "training.deterministic": ((False,), "there is no switch for the kernels of a GPU"),
    "training.dtype": (("float32",), "what rests is the master copy, in fp32"),
    "training.mixed_precision_reduce": (("float32",), "gradients are summed in fp32"),
}

NOT_NEEDED_TABLES: Mapping[str, str] = {
    "comm": "a rank that waits for another is found and named",
    "compile": FUSED,
    "float8": "model.converters names no converter",
    "job": "train.runs_dir and train.run_name say where a run writes",
    "liger_kernel": FUSED,
    "memory_estimation": "echelon plan shows the bytes that each rank holds",
    "mx": "model.converters names no converter",
    "profiling": "events of a run hold the time of every action",
    "quantize": "model.converters names no converter",
}
