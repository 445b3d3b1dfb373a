"""Which steps the object tier holds."""

from __future__ import annotations

from tierfs.objects.client import ObjectClient
from tierfs.persist.deletions import Deletions
from tierfs.persist.layout import manifest_key
from tierfs.persist.manifest_cache import ManifestCache
from tierfs.persist.object_manifest import MAX_BYTES, ObjectManifest, read_manifest
from tierfs.steps.registry import StepRegistry


class ObjectIndex:
    def __init__(self, registry: StepRegistry, client: ObjectClient, deletions: Deletions) -> None:
        self.registry = registry
        self.client = client
        self.deletions = deletions
        self.cache = ManifestCache(registry.tier.meta)
        self.problem = ""

    async def manifest(self, namespace: str, step: str) -> ObjectManifest:
        """The committed manifest of a step: the copy kept here, else fetched. ObjectMissing, ObjectCorrupt."""
        kept = self.cache.load((namespace, step))
        if kept is not None:
            return kept[1]
        data, etag = await self.client.get(manifest_key(namespace, step), most_bytes=MAX_BYTES)
        manifest = read_manifest(data, namespace, step)
        self.cache.save(manifest, etag)
        return manifest
