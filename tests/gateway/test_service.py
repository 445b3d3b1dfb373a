"""What the gateway answers, asked by the library's own client and by others who don't mean well."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.instance import Instance, tierfs, wait_until
from rig.sagemaker import address

pytestmark = pytest.mark.slow

xxhash = pytest.importorskip("xxhash", reason="xxhash is not installed")
requests = pytest.importorskip("requests", reason="requests is not installed")
_client: Any = pytest.importorskip(
    "amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client",
    reason="amzn-sagemaker-checkpointing is not installed",
)
_errors: Any = pytest.importorskip("amzn_sagemaker_checkpointing.storage.clients.inmemory.exceptions")

MIB = 1 << 20
INSTANCE_SIZE = "256M"

MakeClient = Callable[..., Any]


@pytest.fixture
def url(instance: Instance) -> str:
    return "http://{}:{}".format(*address(instance))


@pytest.fixture
def client(url: str) -> Iterator[MakeClient]:
    """The library's client of a rank, in a namespace of the test's own; `metadata_files=0` as its script has it."""
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig

    name = f"ns-{uuid.uuid4().hex[:8]}"
    made: list[Any] = []

    def make(rank: int = 0, world: int = 1, metadata_files: int = 1, retained: int = 3) -> Any:
        config = InMemoryClientConfig(base_url=url)
        made.append(_client.InMemoryCheckpointClient(name, str(rank), str(world), config, metadata_files, retained))
        return made[-1]

    yield make
    for each in made:
        each.close()
    requests.delete(f"{url}/v1/cp/namespaces/{name}", timeout=30)


def metadata_of(*sizes: int) -> bytes:
    """The library's metadata of a step whose ranks hold shards of these sizes."""
    import pickle

    from amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info import _SageMakerStorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    names = [f"item{rank}" for rank in range(len(sizes))]
    infos = {MetadataIndex(name): _SageMakerStorageInfo(at, 0, sizes[at]) for at, name in enumerate(names)}
    return pickle.dumps(Metadata(dict.fromkeys(names, BytesStorageMetadata()), storage_data=infos), protocol=5)


def save(client: Any, step: int, *shards: bytes) -> None:
    for rank, shard in enumerate(shards):
        client.put_checkpoint(step=step, data=shard, rank=rank)
    client.put_checkpoint(step=step, data=metadata_of(*map(len, shards)), metadata_index=0)


def test_the_libraries_own_check_of_a_service(client: MakeClient) -> None:
    one = client(metadata_files=0)
    assert one.get_namespace_config() == {}
    assert one.get_or_create_namespace() == {"num_ranks": 1, "steps_to_retain_per_rank": 3}
    assert one.get_or_create_namespace() == {"num_ranks": 1, "steps_to_retain_per_rank": 3}
    one.put_checkpoint(step=1001, data=b"hello checkpoint")
    assert one.get_checkpoint(step=1001) == b"hello checkpoint"
    assert one.get_latest_checkpoints(limit=5) == [1001]
    one.delete_checkpoint(step=1001)
    assert one.get_checkpoint(step=1001) is None
    assert one.get_latest_checkpoints() == []
    with pytest.raises(_errors.InMemoryResourceNotFoundError):
        one.delete_checkpoint(step=1001)
    one.delete_namespace()
    assert one.get_namespace_config() == {}
    with pytest.raises(_errors.InMemoryResourceNotFoundError):
        one.put_checkpoint(step=1, data=b"of no namespace")


def test_only_whole_steps_are_the_latest(client: MakeClient, instance: Instance) -> None:
    one = client(world=2, retained=10)
    one.get_or_create_namespace()
    for step in (3, 20, 100):
        save(one, step, b"a" * 1000, b"b" * 1000)
    assert one.get_latest_checkpoints() == [100, 20, 3]
    assert one.get_latest_checkpoints(limit=2) == [100, 20]
    one.put_checkpoint(step=200, data=b"a" * 1000, rank=0)
    one.put_checkpoint(step=200, data=metadata_of(1000, 1000), metadata_index=0)
    assert one.get_latest_checkpoints() == [100, 20, 3], "a shard of 200 is missing"
    one.put_checkpoint(step=200, data=b"b" * 1000, rank=1)
    assert one.get_latest_checkpoints() == [200, 100, 20, 3], "in whatever order they came"
    one.put_checkpoint(step=200, data=metadata_of(1000, 1000), metadata_index=0)
    assert instance.steps(one.namespace)["step_200"]["generation"] == 1, "an answer that was lost begins nothing"
    one.put_checkpoint(step=100, data=b"A" * 1000, rank=0)
    assert one.get_latest_checkpoints() == [200, 20, 3], "100 is being saved again"
    with pytest.raises(_errors.InMemoryClientError):
        one.put_checkpoint(step=100, data=metadata_of(1000, 1000), metadata_index=0)
    one.put_checkpoint(step=100, data=b"B" * 1000, rank=1)
    one.put_checkpoint(step=100, data=metadata_of(1000, 1000), metadata_index=0)
    assert one.get_latest_checkpoints() == [200, 100, 20, 3]
    assert [one.get_checkpoint(step=100, rank=rank)[:1] for rank in (0, 1)] == [b"A", b"B"]
    one.delete_checkpoint(step=20, rank=1)
    assert one.get_latest_checkpoints() == [200, 100, 3]


def test_as_many_steps_stay_as_the_namespace_retains_and_status_tells_of_it(
    client: MakeClient, instance: Instance
) -> None:
    one = client(world=2)
    one.get_or_create_namespace()
    namespace = instance.mountpoint / one.namespace
    save(one, 1, b"a" * 1000, b"b" * 1000)
    tierfs("pin", namespace / "step_1")
    for step in range(2, 6):
        save(one, step, b"a" * 1000, b"b" * 1000)
    assert os.getxattr(namespace, "user.tierfs.ram_max_steps") == b"3"
    assert one.get_latest_checkpoints() == [5, 4, 3, 1], "the newest three; what is pinned is nobody's to remove"
    one.put_checkpoint(step=6, data=b"a" * 1000, rank=0)
    assert one.get_latest_checkpoints() == [5, 4, 3, 1], "a step that is not whole takes no other's place"

    def shown() -> Any:
        return instance.status()["gateway"]

    def is_told() -> bool:
        told = shown()
        return (told["requests"] or 0) >= 17 and told["received_bytes"] >= 11_000

    wait_until(is_told, "its requests are told of")
    told = shown()
    assert told["addresses"] == [instance.options["gateway.listen"]] and told["pid"] == gateway_pid(instance)
    assert told["failed"] == 0
    entry = {"namespace": one.namespace, "num_ranks": 3, "steps_retained": 3}
    assert entry in told["namespaces"]
    line = next(line for line in tierfs("status", instance.mountpoint).splitlines() if line.startswith("gateway"))
    assert told["addresses"][0] in line and " requests" in line and one.namespace in line
    one.delete_namespace()
    assert entry not in shown()["namespaces"]


def test_metadata_that_says_more_than_the_shards_hold_completes_nothing(client: MakeClient) -> None:
    one = client(world=2)
    one.get_or_create_namespace()
    one.put_checkpoint(step=1, data=b"a" * 1000, rank=0)
    one.put_checkpoint(step=1, data=b"b" * 999, rank=1)
    with pytest.raises(_errors.InMemoryClientError):
        one.put_checkpoint(step=1, data=metadata_of(1000, 1000), metadata_index=0)
    assert one.get_latest_checkpoints() == []


def test_a_body_with_another_checksum_or_without_an_end_leaves_nothing(
    client: MakeClient, url: str, instance: Instance
) -> None:
    one = client()
    one.get_or_create_namespace()
    path = f"/v1/cp/checkpoints/{one.namespace}/0/5"
    wrong = json.dumps({"checksum": base64.b64encode(xxhash.xxh3_128(b"other").digest()).decode()})
    answer = requests.post(url + path, data=b"body", headers={"Shard-Meta": wrong}, timeout=30)
    assert answer.status_code == 400 and "checksum" in answer.json()["detail"]
    for nonsense in ("", "[]", "{}", '{"checksum": "####"}', '{"checksum": "aaaa", "algorithm": "md5"}'):
        assert requests.post(url + path, data=b"", headers={"Shard-Meta": nonsense}, timeout=30).status_code == 400
    with socket.create_connection(address(instance), 30) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode() + b"x" * 500)
        shard = instance.mountpoint / one.namespace / "step_5" / "rank_0" / "checkpoint.pt"
        wait_until(shard.exists, "the shard's file is there")
    wait_until(lambda: not shard.exists(), "nothing is left of half a shard")
    assert one.get_checkpoint(step=5) is None


def test_a_name_from_the_wire_reaches_no_other_path(client: MakeClient, url: str, instance: Instance) -> None:
    one = client()
    one.get_or_create_namespace()
    for name in ("..", "%2e%2e", "a%2Fb", ".hidden", "%00", "x" * 300, "caf%C3%A9", "%ff", ""):
        target = f"/v1/cp/namespaces/{name}?num_ranks=1&steps_retained=1"
        assert raw(instance, "POST", target) in (400, 404), name
    for rank, step in (("2", "5"), ("-1", "5"), ("0", "-5"), ("0", "5.0"), ("0", "..%2f5"), ("0", "٣"), ("", "5")):
        target = f"/v1/cp/checkpoints/{one.namespace}/{rank}/{step}".encode().decode("latin-1")
        assert raw(instance, "POST", target) in (400, 404), (rank, step)
    for query in ("", "num_ranks=0", "num_ranks=x", "num_ranks=1&steps_retained=-1", "num_ranks=99999999999999999999"):
        assert raw(instance, "POST", f"/v1/cp/namespaces/new?{query}") == 400
    assert raw(instance, "POST", f"/v1/cp/namespaces/{one.namespace}?num_ranks=7") == 409
    assert raw(instance, "POST", "/v1/cp/cluster/reset") == 403
    assert {path.name for path in instance.mountpoint.iterdir()} == {one.namespace}
    outside = instance.mountpoint.parent / "outside"
    outside.mkdir()
    (instance.mountpoint / "link").symlink_to(outside)
    (instance.mountpoint / one.namespace / "step_6").symlink_to(outside)
    try:
        assert raw(instance, "POST", "/v1/cp/namespaces/link?num_ranks=1") >= 400
        with pytest.raises(_errors.InMemoryStorageError):
            one.put_checkpoint(step=6, data=b"x")
        assert list(outside.iterdir()) == []
    finally:
        (instance.mountpoint / "link").unlink()
        (instance.mountpoint / one.namespace / "step_6").unlink()
        outside.rmdir()


def raw(instance: Instance, method: str, target: str) -> int:
    """The status that the very bytes of this target get."""
    with socket.create_connection(address(instance), 30) as connection:
        connection.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode("latin-1"))
        return int(connection.recv(65536).split()[1])


def test_http_as_other_clients_speak_it(client: MakeClient, url: str, instance: Instance) -> None:
    one = client(metadata_files=0)
    one.get_or_create_namespace()
    path = f"/v1/cp/checkpoints/{one.namespace}/0/1"
    assert requests.post(url + path, data=(b"chunk" for _ in range(3)), timeout=30).status_code == 200
    assert one.get_checkpoint(step=1) == b"chunk" * 3
    with requests.Session() as session:
        session.proxies = {"http": url}  # a whole URL in the request line
        assert session.get(f"http://{_host(url)}/health", timeout=30).json() == {"status": "healthy"}
    with socket.create_connection(address(instance), 30) as connection:
        expecting = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(expecting.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(b"body" + f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answers.count(b"HTTP/1.1 200") == 2 and answers.endswith(b"body")
    with socket.create_connection(address(instance), 30) as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
        assert b" 400 " in b"".join(iter(lambda: connection.recv(65536), b""))
    assert requests.get(f"{url}/v1/other", timeout=30).status_code == 404


def _host(url: str) -> str:
    return url.removeprefix("http://")


def gateway_pid(instance: Instance) -> int:
    return int((instance.runtime_path / "gateway.pid").read_text().split()[0])


def test_bodies_are_not_held_in_memory_and_a_full_tier_says_so(client: MakeClient, instance: Instance) -> None:
    one = client(metadata_files=0)
    one.get_or_create_namespace()

    def peak_bytes() -> int:
        status = Path(f"/proc/{gateway_pid(instance)}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    before, shard = peak_bytes(), os.urandom(MIB) * 160
    one.put_checkpoint(step=1, data=shard)
    assert one.get_checkpoint(step=1) == shard
    assert peak_bytes() - before < 48 * MIB
    with pytest.raises(_errors.InMemoryServerError, match="Server error"):
        one.put_checkpoint(step=2, data=shard + shard)
    assert one.get_latest_checkpoints() == [1]
    # One that no tier of this size could hold: nothing makes way for it.
    for step in (1, 3):
        head = f"POST /v1/cp/checkpoints/{one.namespace}/0/{step} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n"
        with socket.create_connection(address(instance), 30) as connection:
            connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 507")
    assert one.get_checkpoint(step=1) == shard
    assert not (instance.mountpoint / one.namespace / "step_3").exists()


def test_a_shard_under_way_survives_the_daemon_and_the_next_one_has_a_gateway(
    client: MakeClient, instance: Instance
) -> None:
    one = client(metadata_files=0)
    one.get_or_create_namespace()
    gateway, daemon = gateway_pid(instance), instance.daemon_pid()
    half_sent, go_on = threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        yield b"a" * MIB
        half_sent.set()
        assert go_on.wait(60)
        yield b"b" * MIB

    url = "http://{}:{}/v1/cp/checkpoints/{}/0/7".format(*address(instance), one.namespace)
    answers: list[int] = []
    sender = threading.Thread(target=lambda: answers.append(requests.post(url, data=body(), timeout=60).status_code))
    sender.start()
    assert half_sent.wait(30)
    os.kill(daemon, signal.SIGKILL)
    go_on.set()
    sender.join(60)
    assert answers == [200]
    instance.wait_for_new_daemon(daemon)
    assert gateway_pid(instance) == gateway, "it outlived its daemon"
    assert one.get_checkpoint(step=7) == b"a" * MIB + b"b" * MIB
    os.kill(gateway, signal.SIGKILL)
    wait_until(lambda: gateway_pid(instance) != gateway, "another gateway is started")
    wait_until(lambda: one.get_latest_checkpoints() == [7], "it serves")
    last = gateway_pid(instance)
    instance.umount()
    assert not Path(f"/proc/{last}").exists(), "it ends with the mount"
    instance.mount()
