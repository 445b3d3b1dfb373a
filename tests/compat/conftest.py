from rig.fixtures import ckpt_root, pytest_runtest_makereport, scratch, shared_instance
from rig.object_fixtures import bucket, mount, proxy
from rig.s3_servers import seaweedfs_server

__all__ = [
    "bucket",
    "ckpt_root",
    "mount",
    "proxy",
    "pytest_runtest_makereport",
    "scratch",
    "seaweedfs_server",
    "shared_instance",
]
