"""The course of a Megatron-LM run: what backward computes again, what is said, saved and read."""

from __future__ import annotations

from echelon.config.foreign.ledger import COUNT, FROM_ZERO, Ledger
from echelon.config.foreign.surroundings import Surroundings


def read_recompute(ledger: Ledger, layers: int | None, around: Surroundings) -> None:
    """Map which blocks are redone in backward: all of them, their attention, or none."""
    short, key = "--recompute-activations", "--recompute-granularity"
    method_key, count_key = "--recompute-method", "--recompute-num-layers"
    setting = "recompute.policy"
    if ledger.flag(short, setting=setting):
        ledger.set(short, setting, "selective", "attention is redone")
    if (policy := ledger.word(key, ("full", "selective"), setting=setting)) is not None:
        ledger.set(key, setting, policy, "what is redone")
    modules = (["core_attn"], "core_attn")
    ledger.only("--recompute-modules", modules, "selective is the attention", setting=setting)
    method = ledger.word(method_key, ("uniform", "block"), setting="recompute.every")
    count = ledger.whole(count_key, COUNT, setting="recompute.every")
    if policy != "full" or method is None:
        for name in (method_key, count_key):
            ledger.skip(name, f"it is about {key} full")
        return
    stage = -(-layers // around.degrees["pp"]) if layers else 0
    every_block = count in (None, 1) if method == "uniform" else (count or 0) >= stage > 0
    if every_block:
        ledger.set(method_key, "recompute.every", 1, "every block, each from its own input")
        ledger.skip(count_key, "every block, each from its own input")
        return
    why = "a block is redone from its own input, and recompute.every counts from the first block"
    ledger.refuse(count_key, why, works=(f"{method_key} uniform {count_key} 1",))


def read_run(ledger: Ledger, around: Surroundings) -> None:
    """Map how often a run says, saves and validates, and what it reads."""
    for key, setting, why in (
        ("--log-interval", "observe.log_every", "steps between step lines"),
        ("--save-interval", "checkpoint.every", "steps between checkpoints"),
        ("--eval-interval", "train.validate_every", "steps between validations"),
        ("--eval-iters", "train.validation_batches", "global batches of a validation"),
        ("--seed", "train.seed", "of first weights and sample order"),
    ):
        value = ledger.whole(key, FROM_ZERO, setting=setting)
        if value is None:
            continue
        if key == "--eval-iters" and (value == 0 or not ledger.has("--eval-interval")):
            ledger.skip(key, "no validation without both an interval and batches")
        elif key == "--eval-interval" and ledger.given.get("--eval-iters") == 0:
            ledger.skip(key, "--eval-iters is 0")
        else:
            ledger.set(key, setting, value, why)
    for key in ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"):
        if "data.source" in around.told:
            ledger.skip(key, "data.source says what is read")
        elif ledger.has(key):
            why = "the .bin and .idx files of Megatron-LM are not read"
            ledger.refuse(key, why, works=("--set data.source=PATH",), setting="data.source")
    for key in ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"):
        if around.told & {"data.source", "data.tokenizer"} or ledger.given.get(
            "--tokenizer-type"
        ) in ("NullTokenizer", None):
            ledger.skip(key, "data.tokenizer says it; prepared data has its own")
        elif ledger.has(key):
            works = ("--set data.tokenizer=tokenizer.json",)
            ledger.refuse(key, "data.tokenizer is not told", works=works, setting="data.tokenizer")
