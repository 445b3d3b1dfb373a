"""The local-disk tier: whole steps on an NVMe of this node, for more steps than RAM holds and for coming back after RAM
was lost. It knows files and steps of this node; nothing here knows how bytes travel between nodes or to a store."""
