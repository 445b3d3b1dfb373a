"""The gateway: an HTTP service for scripts that save with Amazon's SageMaker checkpointing library.

A process of its own, which reads and writes the mount as any program does. It knows nothing of how steps are kept.
"""
