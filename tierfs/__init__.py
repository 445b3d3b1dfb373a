"""The tiers a training checkpoint lives in, and what tierfs knows about steps.

Nothing here touches FUSE or torch: this package can be imported anywhere.
"""

__version__ = "0.1.0"
