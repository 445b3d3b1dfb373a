"""How bytes go from node to node."""
