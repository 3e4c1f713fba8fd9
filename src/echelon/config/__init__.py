# SPDX-License-Identifier: Apache-2.0
"""run.toml -> Job -> Plan: settings read, checked and derived, nothing "auto" left.

Files and rooms from the top floor down; each imports lower floors only:

load.py             load_job: a run file or preset, and --set flags -> a Job
adaptation.py       values of a run preset that give way     generation.py   the plan that writes
rules/              what must hold between settings
automatic.py        what "auto" means for ZeRO, step lines, stages and schedules
files/              files that are written, shown and measured
plan_view.py        a Plan seen as settings
model/              settings of a model, config.json
derived/            numbers that follow from settings
cluster/            devices, links, cluster files
setting_layers.py   files, presets and flags as layers
view.py             View: typed access to settings, of a run or of a Plan
entries.py          a value, where it was set
schema.py           every setting, in the order of a run file
job.py              Job: the Plan, and data, steps, folders
reading.py          files that a user names            presets/   models, clusters, runs by name
"""
