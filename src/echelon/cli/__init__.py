"""The command line: one small file per command, which parses, calls and prints.

Results go to stdout and all else to stderr. Nothing here imports torch before a command needs it.
"""
