"""The catalogue: which nodes and steps exist. A store of keys with revisions, and what tierfs keeps in it."""
