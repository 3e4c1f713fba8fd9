"""Configurations of other tools -> settings of a run.toml, key by key.

Every key becomes a setting, or is known to be without need here, or is refused by name. A key that
is absent keeps our default where it can change only speed and memory; where it changes numbers, the
default of the tool is written out.
"""
