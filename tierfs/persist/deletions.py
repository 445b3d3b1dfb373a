"""Steps that are to go from the object tier."""

from __future__ import annotations

from tierfs.objects.client import ObjectClient
from tierfs.steps.registry import StepRegistry


class Deletions:
    def __init__(self, registry: StepRegistry, client: ObjectClient) -> None:
        self.registry = registry
        self.client = client
