"""Names of models on the Hugging Face hub -> our presets."""

from __future__ import annotations

import re
from pathlib import Path

from echelon.config.presets import preset_names
from echelon.interop.key_reader import KeyReader

_TAIL = re.compile(r"-(instruct|base|chat|hf|it|thinking|v0\.\d|\d{4})(?=-|$)")
WEIGHTS = "train.weights"


def preset_of(name: str) -> str | None:
    """Return the preset that has the sizes of a model; None where none is known to."""
    plain = name.rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _TAIL.sub("", plain)) != plain:
        plain = shorter
    presets = {_letters(preset): preset for preset in preset_names("models")}
    return presets.get(_letters(plain))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


def read_model_name(reader: KeyReader, key: str, keys_set: frozenset[str]) -> None:
    """Map the model that a trainer starts from: its sizes, and the weights that it has."""
    if not reader.has(key):
        return
    name = str(reader.given[key])
    named = {"model.preset", "model.hf_config", "model.layers"} & keys_set
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        reader.set(key, "model.hf_config", str(folder / "config.json"), "its sizes")
        reader.set(key, WEIGHTS, str(folder), "what the run starts from")
        return
    preset = preset_of(name)
    if named:
        reader.skip(key, f"{min(named)} of what the run builds on says its sizes")
    elif preset is None:
        why = "its sizes are not known here: name its config.json, in a folder of yours"
        reader.refuse(key, why, suggestions=("--set model.hf_config=FOLDER/config.json",))
    else:
        reader.set(key, "model.preset", preset, f"the sizes of {name}")
    if WEIGHTS in keys_set:
        reader.skip(key, f"{WEIGHTS} says what the run starts from")
    else:
        reader.refuse(
            WEIGHTS,
            f"the run starts from the weights of {name}, which are fetched by nobody here",
            suggestions=(f"--set {WEIGHTS}=FOLDER",),
        )
