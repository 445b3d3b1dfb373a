"""Steps of plain files with a marker that names them (Hugging Face's index), for tests that need no trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MIB = 1 << 20
MARKER = "model.safetensors.index.json"


def shard_names(count: int) -> list[str]:
    return [f"model-{index:05}.safetensors" for index in range(count)]


def content(seed: int, index: int, size_bytes: int) -> bytes:
    """What shard `index` of the step with this seed holds: no two are alike."""
    return np.random.default_rng((seed, index)).bytes(size_bytes)


def write_step(step: Path, seed: int, sizes: Sequence[int]) -> None:
    """Shards of these sizes, each fsynced as a trainer does, then the marker."""
    step.mkdir(parents=True, exist_ok=True)
    names = shard_names(len(sizes))
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        with (step / name).open("wb") as file:
            file.write(content(seed, index, size))
            file.flush()
            os.fsync(file.fileno())
    write_marker(step, len(sizes))


def write_marker(step: Path, count: int) -> None:
    """Names so many shards, whoever wrote them."""
    weights = {f"w{name}": name for name in shard_names(count)}
    (step / MARKER).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def check_step(step: Path, seed: int, sizes: Sequence[int]) -> None:
    """Reads all and fails naming the first byte that is another."""
    for index, (name, size) in enumerate(zip(shard_names(len(sizes)), sizes, strict=True)):
        expected, found = content(seed, index, size), (step / name).read_bytes()
        assert len(found) == size, f"{step / name} has {len(found)} bytes instead of {size}"
        if found != expected:
            wrong = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
            raise AssertionError(f"{step / name}: {len(wrong)} bytes are wrong, the first at {wrong[0]}")
    assert (step / MARKER).exists()
