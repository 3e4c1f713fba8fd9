"""The DeepSpeed plugin of an Accelerate YAML: what stands in it, without a file of DeepSpeed's own.

https://huggingface.co/docs/accelerate/usage_guides/deepspeed. What it leaves open is DeepSpeed's:
gradients accumulate and are summed in the dtype of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.foreign.deepspeed_offload import HOMES
from echelon.config.foreign.ledger import COUNT, Ledger
from echelon.config.foreign.ranks import set_batch
from echelon.config.foreign.surroundings import Surroundings
from echelon.config.kinds import Integer, Text

TABLE = "deepspeed_config"
STAGE = Integer(minimum=0, maximum=3)
DEFAULT_STAGE = 2
STEPS, CLIP = f"{TABLE}.gradient_accumulation_steps", f"{TABLE}.gradient_clipping"
FILE = f"{TABLE}.deepspeed_config_file"

NOT_NEEDED: Mapping[str, str] = {
    "deepspeed_exclusion_filter": "the launcher picks devices",
    "deepspeed_hostfile": "the launcher knows the hosts",
    "deepspeed_inclusion_filter": "the launcher picks devices",
    "deepspeed_moe_layer_cls_names": "a unit is zero.unit_blocks whole blocks",
    "deepspeed_multinode_launcher": "ranks are started here or by torchrun",
    "zero3_init_flag": "always so: each rank makes its own slices only",
    "zero3_save_16bit_model": "a checkpoint holds whole tensors by name, whatever the split",
}


def read_stage(ledger: Ledger) -> int:
    """Map the stage of ZeRO, and return it; a file of DeepSpeed's own is to be imported itself."""
    if ledger.has(FILE) and ledger.given[FILE] not in ("none", ""):
        why = "import that file, with --kind deepspeed: it says all that this one does not"
        ledger.refuse(FILE, why)
    key = f"{TABLE}.zero_stage"
    stage = ledger.whole(key, STAGE, setting="zero.stage")
    source = "" if ledger.has(key) else ledger.default
    stage = DEFAULT_STAGE if stage is None else stage
    ledger.set(key, "zero.stage", stage, "what data ranks share out", source=source)
    return stage


def read_plugin(ledger: Ledger, data: int, around: Surroundings) -> None:
    """Map where slices rest, clipping and accumulation."""
    for what, table in (("optimizer", "optimizer"), ("parameter", "param")):
        key = f"{TABLE}.offload_{table}_device"
        if (home := ledger.word(key, HOMES, setting=f"zero.{what}_offload")) is not None:
            setting = f"zero.{what}_offload"
            ledger.set(key, setting, HOMES[home], "where they rest between uses")
        path = f"{TABLE}.offload_{table}_nvme_path"
        folder = ledger.read(path, Text(), setting="zero.offload_dir")
        if home == "nvme" and isinstance(folder, str) and folder != "none":
            ledger.set(path, "zero.offload_dir", folder, "folder of the files")
        else:
            ledger.skip(path, f"nothing of the {what} rests in files")
    steps = ledger.whole(STEPS, COUNT, setting="batch.global_sequences")
    if steps is not None:
        set_batch(ledger, (STEPS, STEPS, STEPS), (None, None, steps), data, around.microbatch)
    limit = ledger.number(CLIP, setting="optimizer.clip_norm")
    if limit is not None:
        ledger.set(CLIP, "optimizer.clip_norm", limit or "none", "largest norm; 0 is no limit")
    for name, why in NOT_NEEDED.items():
        ledger.skip(f"{TABLE}.{name}", why)
