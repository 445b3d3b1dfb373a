"""Markers: real ones are read right, hostile ones do nothing, and neither takes long."""

from __future__ import annotations

import builtins
import collections
import contextlib
import io
import json
import os
import pickle
import pickletools
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.errors import MarkerUnreadable, SettingsError
from tierfs.settings import StepSettings
from tierfs.steps.inert_pickle import PickleRefused, read_pickle
from tierfs.steps.markers import (
    Marker,
    MarkerContent,
    MarkerRules,
    is_data_file_name,
    read_dcp_marker,
    read_index_marker,
)

RULES = MarkerRules(StepSettings().markers)


# --- what real programs write


def save_with_dcp(directory: Path, **options: Any) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {f"layer.{at}.weight": torch.arange(64.0 * (at + 1)) for at in range(9)}
    state["optimizer"] = {"lr": 0.1, "betas": (0.9, 0.99), "name": "adam", "step": 2**40}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, **options), no_dist=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"thread_count": 4}, {"single_file_per_rank": False}, {"sync_files": False}],
    ids=lambda options: "-".join(options) or "default",
)
@pytest.mark.filterwarnings("ignore")
def test_a_stock_dcp_marker_names_each_data_file_and_how_long_it_is(tmp_path: Path, options: dict[str, Any]) -> None:
    save_with_dcp(tmp_path, **options)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.distcp")}
    assert len(sizes) == {"thread_count": 4, "single_file_per_rank": 13}.get("".join(options), 1)
    # DCP's items fill their files: the end of the last one is the end of the file.
    assert read_dcp_marker(tmp_path / ".metadata") == MarkerContent(sizes)


@pytest.mark.filterwarnings("ignore")
def test_a_safetensors_marker_of_dcp_is_read(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    save_with_dcp(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    found = read_dcp_marker(tmp_path / ".metadata")
    assert found.unknown_entries == 0
    assert {
        name: (tmp_path / name).stat().st_size >= least > 0 for name, least in found.files.items()
    } == dict.fromkeys((path.name for path in tmp_path.glob("__*")), True)


@pytest.mark.filterwarnings("ignore")
def test_a_huggingface_save_of_dcp_writes_an_index_that_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {"a": torch.ones(8), "b": torch.ones(8)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 2})
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = read_index_marker(tmp_path / "model.safetensors.index.json")
    assert found == MarkerContent(dict.fromkeys((path.name for path in tmp_path.glob("*.safetensors")), 0))
    assert len(found.files) == 2


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.filterwarnings("ignore")
def test_every_protocol_that_a_checkpoint_may_use_reads_the_same(tmp_path: Path, protocol: int) -> None:
    save_with_dcp(tmp_path, thread_count=2)
    expected = read_dcp_marker(tmp_path / ".metadata")
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    data = pickle.dumps(metadata, protocol)
    for name, content in (("plain", data), ("optimized", pickletools.optimize(data))):
        (tmp_path / name).write_bytes(content)
        assert read_dcp_marker(tmp_path / name) == expected


# --- what other programs might write: classes of other modules, wrappers, slots


class StorageInfo:
    def __init__(self, relative_path: object, offset: object = 0, length: object = 0) -> None:
        self.relative_path = relative_path
        self.offset = offset
        self.length = length


class SlottedInfo:
    __slots__ = ("length", "offset", "relative_path")

    def __init__(self, relative_path: str, offset: int, length: int) -> None:
        self.relative_path, self.offset, self.length = relative_path, offset, length


class PathOnly:
    def __init__(self, relative_path: str) -> None:
        self.relative_path = relative_path


class FrameworkMetadata:
    def __init__(self, storage_data: object) -> None:
        self.state_dict_metadata = {"x": [1.5, None, {1, 2}, frozenset((3,)), b"bytes", bytearray(b"more"), -5, 2**70]}
        self.storage_data = storage_data
        self.mcore_data = collections.Counter("abc")


class Exotic(dict[Any, Any]):
    pass


def marker_of(tmp_path: Path, storage_data: object, protocol: int = 4) -> Path:
    path = tmp_path / ".metadata"
    data = pickle.dumps(FrameworkMetadata(storage_data), protocol)
    # The reader must not be able to import the classes even by chance.
    path.write_bytes(data.replace(__name__.encode(), b"x" * len(__name__)))
    return path


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_classes_that_nobody_here_knows_are_read_by_their_attributes(tmp_path: Path, protocol: int) -> None:
    ordered = collections.OrderedDict([("a", StorageInfo("__0_0.distcp", 10, 20)), ("b", SlottedInfo("dir/b", 5, 6))])
    nested = Exotic({"x": [ordered, (StorageInfo("__0_0.distcp", 0, 7), None)], (1, 2): PathOnly("c")})
    found = read_dcp_marker(marker_of(tmp_path, nested, protocol))
    assert found == MarkerContent({"__0_0.distcp": 30, "dir/b": 11, "c": 0})


def test_entries_that_name_no_file_are_counted(tmp_path: Path) -> None:
    content = read_dcp_marker(marker_of(tmp_path, {"a": PathOnly("c"), "b": collections.deque([object()]), "d": 5}))
    assert content.files == {"c": 0}
    assert content.unknown_entries == 2
    assert read_dcp_marker(marker_of(tmp_path, {})) == MarkerContent({})
    assert read_dcp_marker(marker_of(tmp_path, None)) == MarkerContent({})


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (StorageInfo("../../etc/passwd"), r"'\.\.' component"),
        (StorageInfo("/etc/passwd"), "absolute"),
        (StorageInfo("a\0b"), "NUL"),
        (StorageInfo(""), "empty"),
        (StorageInfo(b"bytes"), "no text"),
        (StorageInfo("a", -1, 1), "offset or length -1"),
        (StorageInfo("a", 0, 1 << 63), "offset or length 92233"),
        (StorageInfo("a", True, 1), "offset or length True"),
        (StorageInfo("a", 0, None), "offset or length None"),
        (StorageInfo("a", 0, 1 << 2000), "offset or length None"),
    ],
)
def test_unsafe_names_and_sizes_are_refused_with_path_and_reason(
    tmp_path: Path, info: StorageInfo, message: str
) -> None:
    path = marker_of(tmp_path, {"x": info})
    with pytest.raises(MarkerUnreadable, match=message) as caught:
        read_dcp_marker(path)
    assert str(path) in caught.value.message


# --- hostile files. Python itself tells its audit hooks (PEP 578) of each import, exec, lookup of a class, command…

NOTED: list[str] | None = None


def note_what_python_does(event: str, arguments: tuple[Any, ...]) -> None:
    if NOTED is not None:
        NOTED.append(f"{event} {arguments!r:.100}")


sys.addaudithook(note_what_python_does)


class Runs:
    """Pickles as a call of the given function; the classic attack."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.how = (function, arguments)

    def __reduce__(self) -> Any:
        return self.how


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def name(module: str, attribute: str) -> bytes:
    return short(module) + short(attribute) + b"\x93"


CALL = short("import tests_never_import; raise SystemExit") + b"\x85R"


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Runs(os.system, "touch canary")),
        pickle.dumps(Runs(builtins.eval, "__import__('os').system('touch canary')"), 2),
        pickle.dumps(Runs(builtins.exec, "open('canary', 'w')")),
        pickle.dumps({Runs(os.system, "touch canary"): 1}),
        pickle.dumps(Runs(getattr, Runs(__import__, "os"), "system")),
        # A state for a class, a function, or through `__setstate__` and `__dict__`.
        b"\x80\x04" + name("builtins", "eval") + b"}" + short("__call__") + name("os", "system") + b"sb.",
        b"\x80\x04"
        + name("os", "system")
        + b")\x81}"
        + short("__setstate__")
        + name("os", "system")
        + b"sb"
        + CALL
        + b".",
        b"\x80\x04" + name("a", "b") + b")\x81}" + short("__class__") + name("builtins", "exec") + b"sb.",
        # GLOBAL, INST and OBJ, NEWOBJ_EX, dotted names, persistent ids, extension codes, out-of-band buffers.
        b"cos\nsystem\n" + CALL + b".",
        b"(Vtouch canary\nios\nsystem\n.",
        b"(cos\nsystem\n" + short("touch canary") + b"o.",
        b"\x80\x04" + name("os", "system") + b"(" + short("touch canary") + b"t}\x92.",
        b"\x80\x04" + name("os", "path.os.system") + CALL + b".",
        b"Ppersistent\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x05\x97.",
    ],
)
def test_nothing_of_a_hostile_pickle_runs(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    global NOTED
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    noted: list[str] = []
    NOTED = noted
    try:
        with pytest.raises(MarkerUnreadable):
            read_dcp_marker(path)
    finally:
        NOTED = None
    assert [event for event in noted if not event.startswith(f"open ({str(path)!r}"[:90])] == []
    assert os.listdir(tmp_path) == [".metadata"]


def test_the_attacks_above_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    global NOTED
    monkeypatch.chdir(tmp_path)
    noted: list[str] = []
    NOTED = noted
    try:
        pickle.loads(pickle.dumps(Runs(os.system, "touch canary")))
    finally:
        NOTED = None
    assert os.listdir(tmp_path) == ["canary"]
    assert any(event.startswith("os.system") for event in noted)


#: Of each thing in a bomb: what takes a time that grows as its square takes minutes.
MANY = 400_000
PADDING = b"\x8e" + struct.pack("<Q", 8_000_000) + b"x" * 8_000_000


def hash_bomb() -> bytes:
    """A tuple of twice the tuple of twice…, as a dictionary's key: hashing it takes 2^60 steps."""
    return (
        b"\x80\x04})\x94" + b"".join(b"h" + bytes([at]) + b"h" + bytes([at]) + b"\x86\x94" for at in range(60)) + b"Ns."
    )


def shared_state_bomb() -> bytes:
    """One dictionary of 100,000 attributes as the state of 100,000 entries."""
    attributes = b"}\x94(" + b"".join(short(f"{at:06}") + b"N" for at in range(100_000)) + b"u"
    entry = b"\x8c\x01a\x8c\x01b\x93)\x81h\x00b"
    return (
        b"\x80\x04"
        + attributes
        + b"0\x8c\x01a\x8c\x01b\x93)\x81}"
        + short("storage_data")
        + b"]("
        + entry * 100_000
        + b"esb."
    )


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (hash_bomb(), False),
        (b"\x80\x04" + b"]" * MANY + b".", True),
        (b"\x80\x04" + b"(" * MANY + b".", True),
        (b"\x80\x04" + b"](" + b"]" * MANY + b"e.", True),
        (b"\x80\x04]\x94" + b"h\x00a" * MANY + b".", False),
        (b"\x80\x04" + b"}" + b"NNs" * MANY + b".", False),
        # Deep nesting, after bytes that make the file long enough for so many objects.
        (b"\x80\x04" + PADDING + b"N" + b"\x85" * MANY + b".", False),
        (b"\x80\x04" + PADDING + b"]" * MANY + b"a" * (MANY - 1) + b".", False),
        (b"\x80\x04" + PADDING + b"N)\x81" * MANY + b"b" * (MANY - 1) + b".", False),
        (b"\x80\x04" + PADDING + b"N\x94)\x81" + b"h\x00)\x81" * (MANY // 2) + b"b" * (MANY // 2) + b".", False),
        (b"\x80\x04K\x01" + b"2\x86" * MANY + b".", False),
        (b"\x80\x04r\xff\xff\xff\xffN.", True),
        (b"\x80\x04N\x94r\xff\xff\xff\x7f.", True),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", True),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", True),
        (b"\x80\x04X\xff\xff\xff\xff.", True),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.", True),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", True),
        (b"\x80\x04\x8b\xff\xff\xff\xff.", True),
        (b"\x80\x04\x8b" + struct.pack("<i", 5_000_000) + b"\x7f" * 5_000_000 + b".", False),
        (b"c" + b"x" * 5_000_000 + b"\n\n.", True),
        (b"I" + b"9" * 5_000_000 + b"\n.", True),
        (b"\x80\x04" + shared_state_bomb()[2:], False),
    ],
    ids=lambda value: f"{len(value)}-{value[2:6].hex()}" if isinstance(value, bytes) else str(value),
)
def test_bombs_take_little_time(tmp_path: Path, data: bytes, refused: bool) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    began = time.perf_counter()
    if refused:
        with pytest.raises(PickleRefused):
            read_pickle(data)
    with contextlib.suppress(MarkerUnreadable):
        read_dcp_marker(path)
    # Linear ones take up to a second; the others would take for ever.
    assert time.perf_counter() - began < 5


@given(st.binary(max_size=60))
def test_no_bytes_at_all_do_more_than_be_refused(data: bytes) -> None:
    with contextlib.suppress(PickleRefused):
        read_pickle(data)


@given(st.data())
def test_a_damaged_marker_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(FrameworkMetadata({"a": StorageInfo("f", 1, 2), "b": SlottedInfo("g", 3, 4)})))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(PickleRefused):
        read_pickle(cut)


plain_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 200), 1 << 200), st.text(max_size=300)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=5), inner, max_size=5)),
    max_leaves=30,
)


def as_plain(value: Any) -> Any:
    if type(value).__name__ == "InertDict":
        return {value[at]: as_plain(value[at + 1]) for at in range(0, len(value), 2)}
    return [as_plain(item) for item in value] if isinstance(value, list) else value


@given(value=plain_values, protocol=st.sampled_from([2, 3, 4, 5]), in_python=st.booleans())
def test_plain_values_read_as_python_wrote_them(value: object, protocol: int, in_python: bool) -> None:
    written = io.BytesIO()
    # The pickler in Python writes other operations than the one in C.
    pickler = pickle._Pickler if in_python else pickle.Pickler
    pickler(written, protocol).dump(value)
    assert as_plain(read_pickle(written.getvalue())) == value


def test_the_metadata_of_64000_shards_is_read_in_two_seconds(tmp_path: Path) -> None:
    infos = {
        (f"model.layers.{layer}.attention.weight", (shard * 128, 0)): StorageInfo(
            f"__{shard}_0.distcp", layer << 21, 1 << 21
        )
        for layer in range(1000)
        for shard in range(64)
    }
    path = marker_of(tmp_path, infos)
    began = time.process_time()
    found = read_dcp_marker(path)
    # Less than half of it measured.
    assert time.process_time() - began < 4
    assert found.files == {f"__{shard}_0.distcp": 1000 << 21 for shard in range(64)}


# --- what is no file to read


def test_a_marker_that_is_no_readable_file_says_why(tmp_path: Path) -> None:
    with pytest.raises(MarkerUnreadable, match="No such file"):
        read_dcp_marker(tmp_path / "missing")
    with pytest.raises(MarkerUnreadable, match="not a regular file"):
        read_dcp_marker(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MarkerUnreadable, match="not a regular file"):
        read_dcp_marker(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(MarkerUnreadable, match="symbolic links"):
        read_dcp_marker(tmp_path / "link")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(300 << 20)
    for read in (read_dcp_marker, read_index_marker):
        with pytest.raises(MarkerUnreadable, match="314572800 bytes"):
            read(tmp_path / "huge")
    (tmp_path / "empty").touch()
    with pytest.raises(MarkerUnreadable, match=r"/empty .*(ends early|not there)"):
        read_dcp_marker(tmp_path / "empty")
    (tmp_path / "other").write_bytes(pickle.dumps({"storage_data": {}}))
    with pytest.raises(MarkerUnreadable, match="no storage_data"):
        read_dcp_marker(tmp_path / "other")


def test_an_open_file_is_read_from_its_start_and_left_open(tmp_path: Path) -> None:
    path = marker_of(tmp_path, {"a": StorageInfo("f", 1, 2)})
    with open(path, "rb") as file:
        file.seek(5)
        assert read_dcp_marker(file.fileno()) == read_dcp_marker(path) == MarkerContent({"f": 3})
        assert file.tell() == 5
        path.unlink()
        assert read_dcp_marker(file.fileno()) == MarkerContent({"f": 3})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": "../x"}}', "component"),
        ('{"weight_map": {"a": 5}}', "no text"),
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
    ],
)
def test_an_index_that_is_none_says_why(tmp_path: Path, value: str, message: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(value)
    with pytest.raises(MarkerUnreadable, match=message):
        read_index_marker(path)
    path.write_text(
        json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}})
    )
    assert read_index_marker(path) == MarkerContent({"m-1.safetensors": 0, "m-2.safetensors": 0})


# --- which files are markers


@pytest.mark.parametrize(
    ("inner", "marker"),
    [
        (".metadata", Marker("dcp", ".metadata", "")),
        ("model/fsdp_0/.metadata", Marker("dcp", ".metadata", "model/fsdp_0")),
        ("__0.metadata", Marker("dcp-per-rank", "__0.metadata", "", 0)),
        ("x/__127.metadata", Marker("dcp-per-rank", "__127.metadata", "x", 127)),
        ("trainer_state.json", Marker("close", "trainer_state.json", "")),
        ("model.safetensors.index.json", Marker("close", "model.safetensors.index.json", "")),
        ("", None),
        (".metadata.tmp", None),
        ("__x.metadata", None),
        ("__(rank).metadata", None),
        ("__1_metadata", None),
        (".metadata/x", None),
    ],
)
def test_which_files_are_markers(inner: str, marker: Marker | None) -> None:
    assert RULES.match(inner) == marker


def test_only_the_frameworks_own_rename_commits() -> None:
    assert RULES.commit_rename(".metadata.tmp", ".metadata") == Marker("dcp", ".metadata", "")
    assert RULES.commit_rename("a/__3.metadata.tmp", "a/__3.metadata") == Marker("dcp-per-rank", "__3.metadata", "a", 3)
    assert RULES.commit_rename("a/.metadata.tmp", ".metadata") is None
    assert RULES.commit_rename(".metadata.bak", ".metadata") is None
    assert RULES.commit_rename(".metadata", ".metadata.tmp") is None
    assert RULES.commit_rename("trainer_state.json.tmp", "trainer_state.json") is None


def test_data_files_carry_their_rank() -> None:
    assert is_data_file_name("__0_0.distcp") == 0
    assert is_data_file_name("__12_3.distcp") == 12
    for other in ("__0.distcp", "_0_0.distcp", "__a_0.distcp", "__0_0.distcp.tmp", "x__0_0.distcp", ".metadata"):
        assert is_data_file_name(other) is None


def test_a_bad_marker_setting_is_named() -> None:
    for markers, message in (({"m": "sometimes"}, "kind 'sometimes'"), ({"a/b": "close"}, "a/b"), ({"": "dcp"}, "''")):
        with pytest.raises(SettingsError, match=message) as caught:
            MarkerRules(markers)
        assert caught.value.key == "steps.markers"
