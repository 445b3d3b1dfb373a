"""The RAM tier: a private tmpfs, its ballast of warm huge pages, and the room that growing shards are given.

It holds bytes and free room. What the bytes mean (steps, generations) is `tierfs.steps`' business.
"""
