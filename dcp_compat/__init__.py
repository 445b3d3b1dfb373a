"""What PyTorch users import from tierfs. Stock DCP needs none of it.

It may use `tierfs`, never `mount`; everything that needs torch is imported lazily by its own module.
"""
