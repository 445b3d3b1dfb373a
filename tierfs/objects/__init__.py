"""Object stores: `file://` directories and `s3://` buckets behind one interface, and worker processes that use them.

Knows keys and bytes; what a step is, and which steps go there, is `tierfs.persist`'s.
"""
