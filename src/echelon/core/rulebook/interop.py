# SPDX-License-Identifier: Apache-2.0
"""Rules about configurations of other tools, and about plans that leave for another tool."""

from echelon.core.rules import Area, Rule

IMPORTS_AREA = Area("imports")
"""Configurations of other tools: what is read, mapped, or refused by name."""

IMPORT_KIND = Rule(
    id="import-kind",
    why="""
    `echelon import --help` lists the tools whose files are imported. Whose a file is follows from
    its form (JSON, YAML, TOML or a command) and its keys; where it does not, --from says it. What
    belongs to another tool, or to another way of training in the same tool, is refused as a whole.
    """,
    bad="echelon import trainer.py",
    fixed="echelon import ds_config.json --from deepspeed",
)

IMPORT_SYNTAX = Rule(
    id="import-syntax",
    why="""
    The file must be what its kind says: JSON, YAML, or one command with its flags written out. A
    key that stands there twice is refused, because the parsers of the tools do not agree on which
    of the two counts.
    """,
    bad='{"train_batch_size": 8, "train_batch_size": 16}',
    fixed='{"train_batch_size": 16}',
)

IMPORT_UNKNOWN_KEY = Rule(
    id="import-unknown-key",
    why="""
    Every key of the file is mapped, or known to be without need here, or refused. A key that the
    tool itself does not have is a misspelt one, and a setting that is silently dropped is another
    run. The message names the nearest key that there is.
    """,
    bad='{"zero_optimization": {"stage": 2, "reduce_bucket_sise": 5e8}}',
    fixed='{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}',
)

IMPORT_NOT_HONOURED = Rule(
    id="import-not-honoured",
    why="""
    The key exists in the tool, and its value asks for something that is not done here. Leaving it
    out silently would train something else, or train it at another cost, so it is refused by name
    with the reason. The message lists the values that mean what is done here.
    """,
    bad='{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}',
    fixed='{"zero_optimization": {"stage": 3}}',
)

IMPORT_AUTO = Rule(
    id="import-auto",
    why="""
    "auto" is no value of DeepSpeed: the integration of Hugging Face fills it in from the arguments
    of its trainer and the width of the model. Where those have a counterpart here it is resolved,
    and the table says how; elsewhere the file has to say the value.
    """,
    bad='{"zero_optimization": {"stage": "auto"}}',
    fixed='{"zero_optimization": {"stage": 2}}',
)

IMPORT_CONFLICT = Rule(
    id="import-conflict",
    why="""
    Two keys of the file, or a key and a flag, cannot both hold: three sizes of a batch whose
    product does not fit, fp16 together with bf16, two folders for the files of one offload. None of
    them is preferred.
    """,
    bad='{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
    fixed='{"bf16": {"enabled": true}}',
)

IMPORT_RANKS = Rule(
    id="import-ranks",
    why="""
    The degree of data parallelism is no setting of these tools: it is the number of processes
    that their launcher starts, divided by the degrees of all other axes. The number must be known
    (from the file, or from --ranks) and be divisible by them.
    """,
    bad="echelon import train.sh --from megatron --ranks 48     # tp 8 x pp 4 = 32",
    fixed="echelon import train.sh --from megatron --ranks 64     # data parallel: 64 / 32 = 2",
)

IMPORT_ALLOW = Rule(
    id="import-allow",
    why="""
    --allow KEY drops a key that is refused, because it would change the mathematics of the run:
    the file is read as if it had no such key. A key that is taken, or has no effect here, needs no
    allowance, and one that is misspelt would allow nothing. The report lists the refused keys.
    """,
    bad="echelon import train.sh --allow micro-batch-size",
    fixed="echelon import train.sh --allow rampup-batch-size",
)


EXPORT_AREA = Area("export")
"""Plans that leave: what is read as a plan, and what another tool has no word for."""

EXPORT_NOT_EXPRESSIBLE = Rule(
    id="export-not-expressible",
    why="""
    Every setting of the plan is written in the words of the tool, or recorded beside them because
    the tool takes it from elsewhere (the model from a script, the data from a loader) or has no
    word for something that changes speed only. What is left would let the tool train another run,
    or split it in another way: it is refused by name, with the reason, and with the targets that
    can say it. A run.toml says everything.
    """,
    bad='echelon export run.toml --to megatron     # pipeline.schedule = "zb-v"',
    fixed="echelon export run.toml --to torchtitan     # ZBVZeroBubble",
)

EXPORT_NEEDS_OUT = Rule(
    id="export-needs-out",
    why="""
    A schedule of one's own, or a cluster that is no preset, is a file of its own beside the one
    that is written, and named in it. With --out both are written into one folder; on a terminal
    the second would be lost.
    """,
    bad="echelon export runs/searched --to run.toml     # its schedule was found by a search",
    fixed="echelon export runs/searched --to run.toml --out again/run.toml",
)

PLAN_SOURCE = Rule(
    id="plan-source",
    why="""
    A plan is read from a run.toml or a preset, from the plan.json of a run, or from the folder of
    a run. A plan.json is read by the version that wrote it: its schema is in it.
    """,
    bad="echelon compare runs/nano/metrics.jsonl run.toml",
    fixed="echelon compare runs/nano run.toml",
)
