"""Stubs and hydration: files of the tree whose bytes are in the object tier, and how they come back."""
