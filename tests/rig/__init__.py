"""The test rig: real instances, mounted through the command a user types, and real training jobs.

Nothing here knows how tierfs works inside: it mounts, reads `tierfs status --json` and sends signals, so that the
same jobs also run on a plain directory (set TIERFS_TEST_DIR) to tell a fault of the product from one of a test.
"""
