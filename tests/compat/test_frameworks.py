"""Hugging Face Trainer and Lightning: they rotate, link and resume on the mount as on a local disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from rig.frameworks import hugging_face_trainer, lightning_trainer
from rig.ranks import run_ranks

pytestmark = pytest.mark.slow


def test_hugging_face_trainer_keeps_the_newest_by_directory_time_and_resumes(ckpt_root: Path) -> None:
    assert run_ranks(hugging_face_trainer, ckpt_root, 4, False, world=1) == [4]
    kept = [path for path in ckpt_root.glob("checkpoint-*") if path.is_dir()]
    assert sorted(path.name for path in kept) == ["checkpoint-3", "checkpoint-4"]
    by_time = sorted(kept, key=lambda path: path.stat().st_mtime)
    assert [path.name for path in by_time] == ["checkpoint-3", "checkpoint-4"]
    assert run_ranks(hugging_face_trainer, ckpt_root, 6, True, world=1) == [6]
    assert sorted(path.name for path in ckpt_root.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_lightning_links_its_last_checkpoint_and_resumes_from_it(ckpt_root: Path) -> None:
    assert run_ranks(lightning_trainer, ckpt_root, 3, None, world=1) == [3]
    last = ckpt_root / "last.ckpt"
    assert last.is_symlink() and str(last.readlink()) == "epoch=0-step=3.ckpt"
    assert sorted(path.name for path in ckpt_root.glob("epoch*")) == ["epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt"]
    assert run_ranks(lightning_trainer, ckpt_root, 5, last, world=1) == [5]
    assert str(last.readlink()) == "epoch=0-step=5.ckpt"
