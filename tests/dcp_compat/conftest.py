from rig.fixtures import ckpt_root, pytest_runtest_makereport, scratch, shared_instance

__all__ = ["ckpt_root", "pytest_runtest_makereport", "scratch", "shared_instance"]
