"""A Plan -> the configuration of another tool, or a run.toml: each reads back as the same plan.

`settings.py` turns a plan into settings; `target.py` holds what every tool has in common; one file
for each tool says which of its keys a plan becomes, and what it cannot say.
"""
