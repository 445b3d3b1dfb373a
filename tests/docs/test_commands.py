"""Every command of README.md and docs/quick-start.md, run for real and in order, on real mounts.

A command that is new there is run as well; what can't be run here stands in NOT_RUN with its reason, word for word.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.cluster import remove_leftovers, sweep
from rig.documents import Block, blocks
from rig.instance import wait_until
from rig.network import Host, Network
from rig.reader import Reader
from rig.s3_servers import S3Server, seaweedfs_server
from tests.conftest import needs_fuse, repository

__all__ = ["seaweedfs_server"]

README = blocks(repository() / "README.md", "README.md")
QUICK_START = blocks(repository() / "docs" / "quick-start.md", "docs/quick-start.md")

NOT_RUN = {
    "make setup": "this test runs in what it makes; CI starts with it on a bare machine",
    "make demo": "CI runs it beside the tests",
    "make test": "this test is a part of it",
    "make soak": "it takes half an hour; tests/soak has a short one",
    "sudo apt-get install etcd-server": "make setup installs it (scripts/system-packages.sh)",
    "torchrun --nproc-per-node 2 -m dcp_compat.launch demo examples/train.py --namespace demo --steps 200": (
        "tests/compat/test_example.py runs that line, kills the training and goes on with it; it takes a minute"
    ),
}

#: What is written there, and what it is here. Mounts of several nodes share one machine's memory.
REPLACED = {"size=50%": "size=256MiB"}

#: Where the blocks of a heading are typed, in order; all others on "machine".
PLACES = {"Two nodes": (("etcd-host",), ("one", "two"))}
#: They serve until they are ended.
BACKGROUND = ("etcd ",)


@pytest.fixture(scope="module", autouse=True)
def privileges() -> None:
    needs_fuse()


@pytest.fixture
def network() -> Iterator[Network]:
    sweep()
    with Network() as network:
        try:
            yield network
        finally:
            for host in network.hosts:
                host.kill()
            remove_leftovers(network.tag)


def reader(network: Network, name: str, *, host: Host | None = None, **environment: str) -> Reader:
    place = Path("/tmp") / network.tag / name
    etcd = next((each.address for each in network.hosts if each.name == "etcd-host"), "")
    replaced = {
        **REPLACED,
        "ETCD-HOST": etcd,
        "/etc/tierfs": str(place / "etc"),
        "/tmp/tierfs-etcd": str(place / "etcd"),
        "/var/tmp/tierfs-objects": str(place / "objects"),
    }
    return Reader(
        place,
        f"{network.tag}-{name}",
        environment=environment,
        replaced={written: here for written, here in replaced.items() if here},
        not_run=list(NOT_RUN),
        background=BACKGROUND,
        prefix=host.command() if host is not None else (),
    )


def test_every_command_that_is_not_run_is_still_written_there() -> None:
    written = {command for block in (*README, *QUICK_START) for command in block.commands}
    assert {command for command in NOT_RUN if command not in written} == set()


@pytest.mark.alone
@pytest.mark.timeout(400)  # doctor tries every instance of the machine, also those of others that can not be reached
def test_every_command_of_the_readme_does_what_it_says(network: Network, seaweedfs_server: S3Server) -> None:
    if "my-bucket" not in {entry["Name"] for entry in seaweedfs_server.client().list_buckets()["Buckets"]}:
        seaweedfs_server.make_bucket("my-bucket")
    hosts = {name: network.join(name) for name in ("etcd-host", "one", "two")}
    readers = {name: reader(network, name, host=host) for name, host in hosts.items()}
    readers["machine"] = reader(network, "machine", **seaweedfs_server.environment())
    printed: dict[str, str] = dict.fromkeys(readers, "")
    try:
        for block in README:
            for name in places_of(block):
                printed[name] += readers[name].follow(block)
            if block.heading == "Two nodes" and "etcd-host" in places_of(block):
                wait_until(lambda: is_listening(hosts["etcd-host"], 2379), "etcd listens", 20)
        assert "step_2" in printed["machine"] and "loaded" in printed["machine"]
        assert "run1/step_2: reached the level object" in printed["machine"]
        both_are_one(readers["one"], readers["two"])
    finally:
        readers["machine"].leave()
    ran = sum(len(each.ran) for each in readers.values())
    assert ran >= 14, f"only {ran} commands were found"


def places_of(block: Block) -> tuple[str, ...]:
    same = [each for each in README if each.heading == block.heading]
    return PLACES[block.heading][same.index(block)] if block.heading in PLACES else ("machine",)


def is_listening(host: Host, port: int) -> bool:
    return f":{port} " in host.run("ss", "-Hltn")


def both_are_one(one: Reader, two: Reader) -> None:
    """The two nodes of the README are one cluster: what is saved on the one is loaded on the other."""

    def states() -> list[str]:
        return [line for line in two.type(["tierfs nodes /ckpt"]).splitlines() if "serving" in line]

    wait_until(lambda: len(states()) == 2, "two nodes serve", 20)
    one.type(["mkdir /ckpt/run1", "python examples/save_and_load.py /ckpt/run1"])
    assert "reached the level replica" in two.type(["tierfs wait /ckpt/run1/step_2 --level replica --timeout 30"])
    two.type(["cmp /ckpt/run1/step_2/__0_0.distcp " + str(one.mountpoint / "run1" / "step_2" / "__0_0.distcp")])


@pytest.mark.timeout(400)
def test_every_command_of_the_quick_start_does_what_it_says() -> None:
    place = Path("/tmp") / f"tierfs-docs-{uuid.uuid4().hex[:8]}"
    replaced = {**REPLACED, "/var/tmp/tierfs-objects": str(place / "objects")}
    typist = Reader(place, place.name, environment={}, replaced=replaced, not_run=list(NOT_RUN))
    try:
        for block in QUICK_START:
            typist.follow(block)
        assert len(typist.ran) >= 15
        assert not (place / "objects").exists()
    finally:
        typist.leave()
        remove_leftovers(place.name)
