"""What Amazon's SageMaker checkpointing library (PyPI: amzn-sagemaker-checkpointing) writes: its names, its metadata.

Pure: bytes and names in, bytes and names out. How the library is answered over HTTP is `mount.gateway`'s.
"""
