# SPDX-License-Identifier: Apache-2.0
"""Names of models on the Hugging Face hub -> our presets."""

from __future__ import annotations

import re
from pathlib import Path

from echelon.config.presets import preset_names
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import KeyReader
from echelon.interop.torchtitan.flavors import FLAVORS, Flavor

_TAIL = re.compile(r"-(instruct|base|chat|hf|it|thinking|v0\.\d|\d{4})(?=-|$)")
WEIGHTS = "train.weights"


def model_of(name: str) -> Flavor | None:
    """Return the preset that has the sizes of a model, and its changes; None if unknown."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _TAIL.sub("", plain)) != plain:
        plain = shorter
    presets = {_letters(preset): preset for preset in preset_names("models")}
    for size in ("8B", "70B"):
        if _letters(plain) == f"llama3.1{size.lower()}":
            return FLAVORS["llama3", size]
    preset = presets.get(_letters(plain))
    return None if preset is None else Flavor(preset=preset)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


def read_model_name(reader: KeyReader, key: str, context: ImportContext) -> None:
    """Map the model that a trainer starts from: its sizes, and the weights that it has."""
    if not reader.has(key):
        return
    name = str(reader.given[key])
    named = {"model.preset", "model.hf_config", "model.layers"} & context.keys_named
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        reader.set(key, "model.hf_config", str(folder / "config.json"), "its sizes")
        reader.set(key, WEIGHTS, str(folder), "what the run starts from")
        return
    found = model_of(name)
    if named:
        reader.skip(key, f"{min(named)} of what the run builds on says its sizes")
    elif found is None:
        why = "its sizes are not known here: name its config.json, in a folder of yours"
        reader.refuse(key, why, suggestions=("--set model.hf_config=FOLDER/config.json",))
    else:
        reader.set(key, "model.preset", found.preset, f"the sizes of {name}")
        if found.name:
            reader.set(key, "model.name", found.name, "the preset with what it has otherwise")
        for setting, value in found.changes.items():
            reader.set(key, setting, value, f"of {name}")
    if WEIGHTS in context.keys_named:
        reader.skip(key, f"{WEIGHTS} says what the run starts from")
    else:
        reader.refuse(
            WEIGHTS,
            f"the run starts from the weights of {name}, which are fetched by nobody here",
            suggestions=(f"--set {WEIGHTS}=FOLDER",),
        )
