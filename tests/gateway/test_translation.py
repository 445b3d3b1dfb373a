"""The library's metadata in DCP's words: each item is where it was, all else as it was, and nothing is believed."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierfs.errors import MarkerUnreadable
from tierfs.sagemaker.layout import METADATA, names_in_step, steps_saved
from tierfs.sagemaker.metadata import for_dcp

_library: Any = pytest.importorskip(
    "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info",
    reason="amzn-sagemaker-checkpointing is not installed",
)
Info = _library._SageMakerStorageInfo


def metadata(items: int, ranks: int, *, far: int = 70_000) -> Metadata:
    """Some items have the names of the exchanged objects' attributes: Python pickles each text once."""
    described: dict[str, Any] = {"rank": BytesStorageMetadata(), "offset": BytesStorageMetadata()}
    infos: dict[MetadataIndex, Any] = {MetadataIndex("rank"): Info(0, 0, 7), MetadataIndex("offset"): Info(1, 0, 9)}
    for number in range(items):
        name, chunk = f"model.layers.{number}.weight", torch.Size([number, 5])
        described[name] = TensorStorageMetadata(
            TensorProperties(), chunk, [ChunkStorageMetadata(torch.Size([0, 0]), chunk)]
        )
        infos[MetadataIndex(name, chunk, number % 7)] = Info(number % ranks, number * far, far)
    return Metadata(described, planner_data={"rank": ("rank",)}, storage_data=infos, storage_meta=StorageMeta())


@pytest.mark.parametrize("pickler", [pickle.dumps, pickle._dumps], ids=["c", "python"])  # type: ignore[attr-defined]
@pytest.mark.parametrize("protocol", [4, 5])
def test_items_are_named_by_file_and_the_rest_stays(pickler: Any, protocol: int) -> None:
    original = metadata(3000, 12, far=1 << 33)  # several frames, offsets beyond 32 bits
    translated = for_dcp(pickler(original, protocol=protocol))
    assert translated.ranks == set(range(12))
    loaded = pickle.loads(translated.data)
    expected = {
        index: _StorageInfo(f"rank_{info.rank}/checkpoint.pt", info.offset, info.length)
        for index, info in original.storage_data.items()
    }
    assert loaded.storage_data == expected
    loaded.storage_data = original.storage_data
    assert loaded == original


def test_what_the_library_does_not_write_is_refused() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("it ran",))

    stock = metadata(3, 2)
    stock.storage_data = {index: _StorageInfo("__0_0.distcp", 0, 1) for index in stock.storage_data}
    negative = metadata(3, 2)
    next(iter(negative.storage_data.values())).offset = -1
    more = metadata(3, 2)
    next(iter(more.storage_data.values())).other = 1
    for value in (stock, negative, more, Evil(), [], "text"):
        with pytest.raises(MarkerUnreadable):
            for_dcp(pickle.dumps(value, protocol=5))
    for data in (b"", b"no pickle", pickle.dumps(metadata(3, 2), protocol=2)):
        with pytest.raises(MarkerUnreadable):
            for_dcp(data)


def test_damaged_metadata_is_refused_or_still_of_the_same_form() -> None:
    data = pickle.dumps(metadata(5, 2), protocol=5)
    for length in range(len(data)):
        with pytest.raises(MarkerUnreadable):
            for_dcp(data[:length])
    dice = random.Random(5)
    for _ in range(3000):
        damaged = bytearray(data)
        damaged[dice.randrange(len(data))] = dice.randrange(256)
        try:
            for_dcp(bytes(damaged))
        except MarkerUnreadable:
            continue


def test_both_layouts_are_known_by_their_names() -> None:
    default = [f"rank_{rank}/step_{step}/checkpoint.pt" for rank in (0, 1) for step in (5, 10)]
    default += ["rank_0/step_10/metadata.metadata", "rank_x/step_10/checkpoint.pt", "rank_01/step_10/checkpoint.pt"]
    names = {f"rank_{rank}/checkpoint.pt": f"rank_{rank}/step_10/checkpoint.pt" for rank in (0, 1)}
    assert names_in_step(default, 10) == {**names, METADATA: "rank_0/step_10/metadata.metadata"}
    assert names_in_step(default, 5) == {}, "a step without metadata is none"
    assert steps_saved(default) == [10, 5]
    ray = [f"step_10/rank_{rank}/checkpoint.pt" for rank in (0, 1)] + ["step_10/rank_0/metadata.metadata"]
    assert set(names_in_step(ray, 10)) == {*names, METADATA}
    inside = [path.removeprefix("step_10/") for path in ray]
    assert names_in_step(inside, 10) == {path: path for path in inside}
    assert names_in_step(["__0_0.distcp", ".metadata"], 10) == {} and steps_saved(["step_1/__0_0.distcp"]) == []
