"""Files that are written whole and then mapped: torch, safetensors, numpy. All bits are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rig.checkpoints import MIB

RANDOM = np.random.default_rng(7)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.from_numpy(RANDOM.integers(0, 255, 4 * MIB, dtype=np.uint8)).view(1024, -1),
        "scale": torch.tensor(0.5),
        "half": torch.arange(100_001, dtype=torch.float32).to(torch.bfloat16),
    }


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mmap"])
def test_torch_save_and_load(ckpt_root: Path, mapped: bool) -> None:
    expected = tensors()
    torch.save(expected, ckpt_root / "model.pt")
    assert_same(torch.load(ckpt_root / "model.pt", mmap=mapped), expected)


def test_torch_load_with_a_shared_mapping(ckpt_root: Path) -> None:
    import mmap

    expected = tensors()
    torch.save(expected, ckpt_root / "model.pt")
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        assert_same(torch.load(ckpt_root / "model.pt", mmap=True), expected)


def test_torch_from_file_shared_writes_through(ckpt_root: Path) -> None:
    path = ckpt_root / "shared.bin"
    shared = torch.from_file(str(path), shared=True, size=MIB, dtype=torch.int32)
    shared.copy_(torch.arange(MIB, dtype=torch.int32))
    assert np.array_equal(np.fromfile(path, dtype=np.int32), np.arange(MIB, dtype=np.int32))


def test_a_mapped_checkpoint_outlives_its_removal_and_its_overwriting(ckpt_root: Path) -> None:
    expected = tensors()
    step = ckpt_root / "step_1"
    step.mkdir()
    torch.save(expected, step / "model.pt")
    mapped = torch.load(step / "model.pt", mmap=True)
    (step / "model.pt").unlink()
    torch.save({"other": torch.zeros(3)}, step / "model.pt")
    assert_same(mapped, expected)


def test_safetensors(ckpt_root: Path) -> None:
    expected = tensors()
    for _ in range(2):
        save_file(expected, ckpt_root / "model.safetensors", metadata={"format": "pt"})
        assert_same(load_file(ckpt_root / "model.safetensors"), expected)


def test_numpy_maps_what_it_saved(ckpt_root: Path) -> None:
    expected = RANDOM.integers(0, 1 << 40, (512, 1024))
    np.save(ckpt_root / "array.npy", expected)
    assert np.array_equal(np.load(ckpt_root / "array.npy", mmap_mode="r"), expected)


def test_numpy_memmap_writes_back(ckpt_root: Path) -> None:
    written = np.memmap(ckpt_root / "map.bin", dtype=np.float64, mode="w+", shape=(1024, 512))
    written[:] = np.arange(1024 * 512, dtype=np.float64).reshape(1024, 512)
    written.flush()
    assert np.array_equal(np.fromfile(ckpt_root / "map.bin").reshape(1024, 512), written)
    del written
    changed = np.memmap(ckpt_root / "map.bin", dtype=np.float64, mode="r+", shape=(1024, 512))
    changed[5, 5] = -1
    changed.flush()
    assert np.fromfile(ckpt_root / "map.bin").reshape(1024, 512)[5, 5] == -1
