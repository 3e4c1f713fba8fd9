# SPDX-License-Identifier: Apache-2.0
"""run.toml -> Job -> Plan: settings read, checked and derived, nothing "auto" left.

load.py             load_job: a run file or preset, and --set flags -> a Job
setting_layers.py   files, presets and flags as layers    entries.py   a value, where it was set
view.py             View: typed access to settings, of a run or of a Plan
plan_view.py        a Plan seen as settings
automatic.py        what "auto" means for ZeRO and step lines
stage_placement.py  what "auto" means for stages and schedules
job.py              Job: the Plan, and data, steps, folders

settings/   every setting: kind, default, and what follows from it
rules/      what must hold between settings
model/      settings of a model, config.json
cluster/    devices, links, cluster files
presets/    models, clusters and runs by name
files/      files that are read, written and shown
"""
