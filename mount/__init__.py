"""What touches the kernel: the keeper, the channel, the file system, the daemon and the command line.

Knowledge of tiers and steps belongs in `tierfs`; this package only presents it as a mount.
"""
