# SPDX-License-Identifier: Apache-2.0
"""Configurations of other tools: read into a run.toml, and written from a Plan.

    tools.py            the registry: one record a tool, which commands, search and files read
    abilities.py        what a tool can run, its words for our choices, its keys.toml

Into a run (`echelon import`):
    importer.py         a file -> its tool, its keys, the run that loads; its run.toml
    launcher.py         how many processes a launcher starts, and the cluster for them
    parsing.py          JSON, YAML, TOML or a command -> keys; shell.py: commands of a script
    lenient.py          the keys that hold when one is refused; ZeRO of one rank
    key_reader.py       what becomes of each key: a setting, no need of one, or a refusal
    followed.py         a file that a file names: its keys stand below the one that names it
    import_context.py   what the file leaves to others: model, cluster, ranks
    ranks.py            mesh, data ranks, batch, dtypes: what files of all tools say alike

Out of a plan (`echelon export`):
    plan_settings.py    a Plan -> the fewest settings that give it; its run.toml
    export.py           a plan in the keys of a tool, read back; the files, or the refusal
    formats.py          keys as JSON, TOML, YAML or a command; settings recorded for Echelon alone

weight_names/: under which names files and models of transformers keep parameters.

Imports go down these floors; a tool that others stand on is below them:
    export, llamafactory, axolotl > importer, accelerate, hugging_face
    > followed, nemo > tools and the other folders of tools > formats, launcher, lenient, ranks
    > key_reader, parsing > abilities, import_context, plan_settings, shell, weight_names

accelerate/, deepspeed/, megatron/ and torchtitan/ have the same four parts each: keys.toml, read,
write, abilities. A new tool is a folder with them, and an entry in tools.py.
"""
