"""Several nodes as one namespace: membership, the shared steps, copies on other nodes."""
