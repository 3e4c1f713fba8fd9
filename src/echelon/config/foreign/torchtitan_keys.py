"""Keys of a torchtitan configuration that set nothing here, and the models that its flavors are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavor:
    """Say which preset a flavor of torchtitan is, what it has otherwise, and up to which length."""

    preset: str
    name: str = ""
    changes: Mapping[str, object] = field(default_factory=dict[str, object])
    longest: int | None = None


LLAMA_3_1 = {
    "model.max_positions": 131072,
    "model.rope_scaling.factor": 8.0,
    "model.rope_scaling.low_frequency_factor": 1.0,
    "model.rope_scaling.high_frequency_factor": 4.0,
    "model.rope_scaling.original_positions": 8192,
}
BIASED = {
    "model.experts.router_bias": True,
    "experts.balance": "bias",
    "experts.bias_rate": 0.001,
}
DEEPSEEK = {"model.norm_eps": 1e-5, "batch.documents": "separate", **BIASED}

FLAVORS: Mapping[tuple[str, str], Flavor] = {
    ("deepseek_v3", "671B"): Flavor(
        preset="deepseek-v3", name="deepseek-v3-671b", changes=DEEPSEEK, longest=4096
    ),
    ("llama3", "8B"): Flavor(preset="llama3-8b", name="llama3.1-8b", changes=LLAMA_3_1),
    ("llama3", "70B"): Flavor(preset="llama3-70b", name="llama3.1-70b", changes=LLAMA_3_1),
    ("llama3", "405B"): Flavor(preset="llama3.1-405b"),
    **{
        ("qwen3", size): Flavor(preset=f"qwen3-{size.lower()}")
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
    },
    **{
        ("qwen3", size): Flavor(
            preset=f"qwen3-{size.lower()}", name=f"qwen3-{size.lower()}-biased", changes=BIASED
        )
        for size in ("30B-A3B", "235B-A22B")
    },
}
"""What each model and flavor is: those of Llama 3 are Llama 3.1's, and routers have a bias."""

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
    "checkpoint.enable_ft_dataloader_checkpoints": "the samples of a step follow from the seed",
    "checkpoint.exclude_from_loading": "no checkpoint of torchtitan is read",
    "checkpoint.export_dtype": "a checkpoint holds the master weights",
    "checkpoint.folder": "checkpoints are in the run folder: train.runs_dir",
    "checkpoint.initial_load_in_hf": "no checkpoint of torchtitan is read",
    "checkpoint.initial_load_in_hf_quantized": "no checkpoint of torchtitan is read",
    "checkpoint.initial_load_model_only": "no checkpoint of torchtitan is read",
    "checkpoint.last_save_in_hf": "checkpoints are folders of safetensors",
    "checkpoint.last_save_model_only": "a checkpoint holds all that a run needs to go on",
    "checkpoint.load_only": "echelon train --resume goes on with a run",
    "checkpoint.load_step": "echelon train --resume goes on with the last one",
    "debug.deterministic_warn_only": "there is no switch for the kernels of a GPU",
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
    "parallelism.expert_parallel_comm_backend": "experts.dispatch says how tokens travel",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "what is sent overlaps computation",
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
    "debug.moe_force_load_balance": ((False,), "tokens go where the router sends them"),
    "experimental.custom_args_module": (("",), "keys of a module of yours are not known here"),
    "experimental.custom_import": (("",), "models are presets or settings, not modules"),
    "job.custom_config_module": (("",), "keys of a module of yours are not known here"),
    "memory_estimation.enabled": ((False,), "echelon plan shows the bytes that each rank holds"),
    "model.converters": (([], ""), "nothing is computed in 8 bits, and no module is swapped"),
    "optimizer.early_step_in_backward": ((False,), "an update waits for all gradients"),
    "parallelism.context_parallel_load_balancer": (("headtail",), "pieces lie in zigzag order"),
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
    "training.dataloader": "sequences are cut out of mapped files",
    "validation.dataloader": "sequences are cut out of mapped files",
}
