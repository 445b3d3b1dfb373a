"""The `tierfs` command: one module a group of subcommands, each a thin client of a running instance.

Work that needs the tiers is done by the daemon; this package parses, asks over the control socket and prints.
"""
