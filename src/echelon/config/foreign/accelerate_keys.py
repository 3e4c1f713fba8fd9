"""Keys of an Accelerate YAML that set nothing here: without need, or with one value only."""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config")

PLAIN_TYPES: Mapping[str, str] = {
    "MULTI_GPU": "zero.stage = 0: whole replicas",
    "MULTI_CPU": "zero.stage = 0: whole replicas",
    "NO": "zero.stage = 0: one process",
}
OTHER_TYPES: Mapping[str, str] = {
    "MEGATRON_LM": "import the command of Megatron-LM, with --kind megatron",
    "XLA": "there is no TPU",
    "TP": "set mesh.tp: every matrix is cut over it",
}

LAUNCHER = "torchrun says it"

NOT_NEEDED: Mapping[str, str] = {
    "debug": "a rank that waits for another is found and named",
    "enable_cpu_affinity": "each rank is given cores of its own",
    "gpu_ids": "each rank takes the GPU of its local rank",
    "machine_rank": LAUNCHER,
    "main_process_ip": LAUNCHER,
    "main_process_port": LAUNCHER,
    "main_training_function": "echelon train is the script",
    "rdzv_backend": LAUNCHER,
    "same_network": LAUNCHER,
    "use_cpu": "cluster.preset says what the devices are",
    "fp16": "the old form; mixed_precision says it",
}
TPU_KEYS = (
    "downcast_bf16",
    "tpu_use_cluster",
    "tpu_use_sudo",
)

ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "command_file": ((), "there is no TPU"),
    "commands": (([],), "there is no TPU"),
    "compute_environment": (("LOCAL_MACHINE",), "ranks are started here or by torchrun"),
    "tpu_env": (([],), "there is no TPU"),
    "tpu_name": ((), "there is no TPU"),
    "tpu_vm": ((), "there is no TPU"),
    "tpu_zone": ((), "there is no TPU"),
}

FSDP_NOT_NEEDED: Mapping[str, str] = {
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "always so: each rank makes its own slices only",
    "fsdp_config.fsdp_limit_all_gathers": "always so: zero.prefetch bounds what is whole",
    "fsdp_config.fsdp_state_dict_type": (
        "a checkpoint is written in pieces and read as whole tensors"
    ),
    "fsdp_config.fsdp_sync_module_states": (
        "first weights follow from the seed and each weight's name: equal on all ranks"
    ),
    "fsdp_config.fsdp_use_orig_params": "always so: parameters are views into flat buckets",
}
FSDP_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "fsdp_config.fsdp_ignored_modules": ((), "every parameter is shared out"),
}

OFF_TABLES: Mapping[str, str] = {
    "fp8_config": "nothing is computed in 8 bits",
    "megatron_lm_config": "distributed_type is not MEGATRON_LM",
    "mpirun_config": "ranks are started here or by torchrun",
}
