"""Steps: how they are recognised, sealed, completed, rewritten, retained and named by `latest`.

Decisions about steps live here. Moving bytes between tiers, and anything about the kernel, does not.
"""
