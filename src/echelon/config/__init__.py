"""run.toml -> Job: settings with their sources, presets, and every rule that a plan must keep."""
