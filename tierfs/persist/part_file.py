"""What says that some of a step's files lie in the object tier without the others: one file a node, put last.

It is no commit: nothing takes a step with such files for one that is there. A step that is persisted whole finds in it
what need not be sent again, and its commit takes the place of these files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tierfs.errors import ObjectCorrupt, PathRefused
from tierfs.json_fields import Fields, Wrong, refuse_constant
from tierfs.persist.object_manifest import NodeFile, read_node_file
from tierfs.steps.names import safe_relative

VERSION = 1


@dataclass(frozen=True)
class PartFile:
    """What one node sent, with sizes, checksums and ETags, and the paths of the step's files that it left out. Without
    objects it says only that the node has begun."""

    sent: NodeFile
    left_out: frozenset[str] = frozenset()

    def to_bytes(self) -> bytes:
        value = {"version": VERSION, "sent": json.loads(self.sent.to_bytes()), "left_out": sorted(self.left_out)}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def read_part_file(data: bytes, namespace: str, step: str) -> PartFile:
    """Raises ObjectCorrupt for what is no sound part file of that step."""
    try:
        fields = Fields(json.loads(data, parse_constant=refuse_constant), "the part file")
        if (version := fields.integer("version")) != VERSION:
            raise Wrong(f"version {version} is unknown, this program knows {VERSION}")
        sent = read_node_file(json.dumps(fields.mapping("sent")).encode("ascii"), namespace, step)
        left_out = frozenset(safe_relative(inner) for inner in fields.texts("left_out"))
        fields.end()
        return PartFile(sent, left_out)
    except (Wrong, PathRefused, ValueError, RecursionError) as error:
        raise ObjectCorrupt(f"a part file of {namespace}/{step} in the object tier is damaged: {error}") from None
