# SPDX-License-Identifier: Apache-2.0
"""Configurations of other tools: read into a run.toml, and written from a Plan.

    tools.py            the registry: one record a tool, which commands, search and files read
    abilities.py        records: what a tool can run, what it calls our schedules and optimizers
    tool_writer.py      record: how a tool writes a plan
    tool_tables.py      keys.toml of a tool: keys that set nothing here, settings without a word

Into a run (`echelon import`):
    importer.py         a file -> its tool, its keys, the run that loads; its run.toml
    parsing.py          JSON, YAML, TOML or a command -> keys
    key_reader.py       what becomes of each key: a setting, no need of one, or a refusal
    followed.py         a file that a file names: its keys stand below the one that names it
    import_context.py   what the file leaves to others: model, cluster, ranks
    ranks.py            mesh, data ranks, batch, dtypes: what files of all tools say alike
    echelon_keys.py     settings that a file records for Echelon alone

Out of a plan (`echelon export`):
    plan_settings.py    a Plan -> the fewest settings that give it; its run.toml
    export_attempt.py   a plan in the keys of a tool, read back; what is recorded or refused
    export.py           the files, or the refusal with what would work
    formats.py          keys as JSON, TOML, YAML or a command

weight_names/: under which names files and models of transformers keep parameters.

accelerate/, deepspeed/, megatron/ and torchtitan/ have the same four parts each: keys.toml, read,
write, abilities. A new tool is a folder with them, and an entry in tools.py.
"""
