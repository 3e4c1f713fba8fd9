"""What a DeepSpeed JSON keeps off the device: optimizer state, parameters, activations."""

from __future__ import annotations

from pathlib import Path

from echelon.config.foreign.ledger import FLAG, FROM_ZERO, Ledger
from echelon.config.kinds import Kind, Real, Text

ZERO = "zero_optimization"
HOMES = {"none": "none", "cpu": "host", "nvme": "nvme"}
OPTIMIZER, PARAMETERS = "offload_optimizer", "offload_param"
STATES_OF_ADAM = 4  # DeepSpeed counts a buffer for each of parameter, gradient and two moments.
FRACTION = Real(maximum=1.0)

FILES_ONLY: dict[str, tuple[Kind, str]] = {
    "buffer_size": (FROM_ZERO, "a buffer holds one bucket"),
    "fast_init": (FLAG, "files are made in their final size at once"),
    "max_in_cpu": (FROM_ZERO, "in memory are zero.offload_buffers buckets, whatever the size"),
    "pipeline_read": (FLAG, "always so: the next bucket is read while this one is updated"),
    "pipeline_write": (FLAG, "always so: the last bucket is written while this one is updated"),
}
NOT_NEEDED: dict[str, tuple[Kind, str]] = {
    "cpuadam_cores_perc": (FRACTION, "the update takes the threads that a rank has"),
    "pin_memory": (FLAG, "host memory is always locked where the device is a GPU"),
}


def read_offload(ledger: Ledger) -> None:
    """Map where slices of optimizer state and of parameters rest between uses."""
    homes = {
        OPTIMIZER: _read_home(ledger, OPTIMIZER, "zero.optimizer_offload", "cpu_offload"),
        PARAMETERS: _read_home(ledger, PARAMETERS, "zero.parameter_offload", "cpu_offload_params"),
    }
    ledger.skip(f"{ZERO}.cpu_offload_use_pin_memory", NOT_NEEDED["pin_memory"][1])
    buffers: list[int] = []
    for table, home in homes.items():
        _read_files(ledger, table, home, buffers)
        for name, (kind, why) in NOT_NEEDED.items():
            key = f"{ZERO}.{table}.{name}"
            if ledger.read(key, kind) is not None:
                ledger.skip(key, why)
    whole = "a table is offloaded as a whole or not at all"
    ledger.only(f"{ZERO}.{OPTIMIZER}.ratio", (1, 1.0), whole)
    ledger.only(
        f"{ZERO}.{OPTIMIZER}.super_offload",
        (False,),
        "an update waits for all its gradients, and runs once",
    )
    if buffers:
        keys = [f"{ZERO}.{table}.buffer_count" for table in homes]
        given = [key for key in keys if ledger.has(key)]
        ledger.set(
            given[-1],
            "zero.offload_buffers",
            max(2, *buffers),
            f"buckets in memory at once, at least 2 ({STATES_OF_ADAM} buffers of optimizer state "
            "are one bucket)",
            source=ledger.where(*given),
        )
        for key in given[:-1]:
            ledger.skip(key, f"together with {given[-1]}")


def _read_home(ledger: Ledger, table: str, setting: str, old: str) -> str:
    key, old_key = f"{ZERO}.{table}.device", f"{ZERO}.{old}"
    device = ledger.word(key, HOMES, setting=setting)
    if device is not None:
        ledger.set(key, setting, HOMES[device], "where they rest between uses")
    # DeepSpeed's documentation and its code do not agree on the old name of the second one.
    for name in {old_key, old_key.removesuffix("s")} if table == PARAMETERS else {old_key}:
        if (flag := ledger.flag(name, setting=setting)) is not None:
            ledger.set(name, setting, "host" if flag else "none", f"the old name of {table}")
    entry = ledger.entries.get(setting)
    return str(entry.value) if entry else "none"


def _read_files(ledger: Ledger, table: str, home: str, buffers: list[int]) -> None:
    prefix = f"{ZERO}.{table}"
    names = ("nvme_path", "buffer_count", *FILES_ONLY)
    if home != "nvme":
        for name in names:
            ledger.skip(f"{prefix}.{name}", f"it is about files, and the device is {home}")
        return
    folder = ledger.read(f"{prefix}.nvme_path", Text(), setting="zero.offload_dir")
    if isinstance(folder, str):
        absolute = str(Path(folder).absolute())
        ledger.set(f"{prefix}.nvme_path", "zero.offload_dir", absolute, "folder of the files")
    count = ledger.whole(f"{prefix}.buffer_count", setting="zero.offload_buffers")
    if count is not None:
        buffers.append(count // STATES_OF_ADAM if table == OPTIMIZER else count)
    for name, (kind, why) in FILES_ONLY.items():
        if ledger.read(f"{prefix}.{name}", kind) is not None:
            ledger.skip(f"{prefix}.{name}", why)


def read_activations(ledger: Ledger) -> None:
    """Map activation_checkpointing: it says how inputs are stored, not which blocks are redone."""
    table = "activation_checkpointing"
    key = f"{table}.cpu_checkpointing"
    if ledger.flag(key, setting="recompute.offload"):
        ledger.set(key, "recompute.policy", "full", "stored inputs belong to recomputed blocks")
        ledger.set(key, "recompute.offload", "host", "where stored inputs wait for backward")
    else:
        ledger.skip(key, "stored inputs stay on the device")
    ledger.only(
        f"{table}.partition_activations",
        (False,),
        "stored inputs are cut over tensor ranks with mesh.sequence_parallel = true, not else",
        setting="mesh.sequence_parallel",
    )
    ledger.only(
        f"{table}.number_checkpoints", (), "recompute.policy and recompute.every say what is redone"
    )
    for name, why in (
        ("contiguous_memory_optimization", "stored inputs are not copied"),
        ("synchronize_checkpoint_boundary", "it only served measurement"),
        ("profile", "events of a run hold the time of every action"),
    ):
        if ledger.flag(f"{table}.{name}") is not None:
            ledger.skip(f"{table}.{name}", why)
