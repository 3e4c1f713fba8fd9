# SPDX-License-Identifier: Apache-2.0
"""Commands: scripts of a shell, and the launchers that start processes.

shell.py        the commands of a script, with its variables filled in
shell_words.py  its words and operators, and what variables and sums become
launcher.py     how many processes a launcher starts, and the cluster for them
launchers.toml  launchers, and their flags that count
"""
