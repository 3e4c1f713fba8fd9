"""The folder in which mistakes are made: run files, data, a run, and files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from echelon.cli.main import main

TINY: Mapping[str, object] = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.ffn": 48,
    "batch.sequence_length": 16,
    "batch.global_sequences": 8,
    "batch.microbatch_sequences": 1,
    "optimizer.warmup_steps": 1,
    "data.source": '"words.txt"',
    "train.steps": 2,
    "train.validate_every": 2,
    "checkpoint.every": 1,
}
WORDS = "".join(f"line {i} of {i * i % 97} words, more or less\n" for i in range(400))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODULE = """
import torch

three = 3

def make():
    return torch.nn.Linear(2, 2)

def wants_arguments(one, two):
    return torch.nn.Linear(one, two)
"""
FILES: Mapping[str, str | bytes] = {
    "words.txt": WORDS,
    "prompt.txt": "a few words",
    "empty.txt": "",
    "empty.toml": "",
    "binary.bin": bytes(range(256)) * 16,
    "binary.toml": bytes(range(256)),
    "utf16.toml": 'extends = "nano"\n'.encode("utf-16"),
    "open.toml": 'extends = "nano"\n[mesh\ntp = 2\n',
    "twice.toml": 'extends = "nano"\n[mesh]\ntp = 1\ntp = 2\n',
    "key.toml": 'extends = "nano"\n[mesh]\ntpp = 2\n',
    "table.toml": 'extends = "nano"\n[meshes]\ntp = 2\n',
    "self.toml": 'extends = "self.toml"\n',
    "one.toml": 'extends = "other.toml"\n',
    "other.toml": 'extends = "one.toml"\n',
    "preset.toml": 'extends = "nanoo"\n',
    "comma.json": '{"model_type": "llama",}',
    "list.json": "[1]",
    "config.json": json.dumps(LLAMA),
    "mamba.json": json.dumps({"model_type": "mamba", "hidden_size": 64}),
    "half.json": json.dumps({"model_type": "llama", "hidden_size": 64}),
    "cluster_half.toml": "nodes = 1\n",
    "schedule.csv": "F0.0,F0.1,BW0.0,BW0.1\n",
    "letter.csv": "F0.0,Q0.1\n",
    "missing.csv": "F0.0,BW0.0\nF1.0\n",
    "order.csv": "BW0.0,F0.0\n",
    "module.py": MODULE,
    "syntax.py": "def make(:\n",
    "raises.py": "raise ValueError('boom')\n",
    "imports.py": "import nowhere_at_all\n",
    "ds.json": json.dumps({"zero_optimization": {"stage": 2}, "made_up": 3}),
    "open.json": "{",
    "broken.jsonl": '{"text": "a"}\n{"text": \n',
    "body.jsonl": '{"body": "a text of some words"}\n' * 100,
    "chats.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    "tokens/tokenizer.json": "{",
    "folder/note.md~": "",
}


def write_files(folder: Path) -> None:
    """Write all files into `folder`."""
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "run.toml").write_text(_run_file())


def make_run() -> None:
    """Make a run, prepared data and exported weights in this folder."""
    for command in (
        "train run.toml --set train.run_name=done",
        "data prepare words.txt --out prepared",
        "export weights runs/done --out weights",
    ):
        assert main(command.split()) == 0, command


def _run_file() -> str:
    tables: dict[str, list[str]] = {}
    for key, value in TINY.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, []).append(f"{name} = {value}\n")
    return 'extends = "nano"\n' + "".join(
        f"[{table}]\n{''.join(lines)}" for table, lines in tables.items()
    )
