"""Prolog and epilog on a real instance with an object tier, and by what they make of a job's comment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mount.processes import package_environment
from tests.conftest import repository, wait_until
from tests.mount.keeper_rig import Rig, rig, tierfs

pytestmark = pytest.mark.slow

SLURM = repository() / "deploy/slurm"
MIB = 1 << 20


@pytest.fixture
def mounted() -> Iterator[Rig]:
    with rig("mount.daemon") as made:
        yield made


class Job:
    """A job on this node, which is the second of its two, as Slurm tells its scripts of it."""

    def __init__(self, mounted: Rig, comment: str, **settings: str) -> None:
        programs = mounted.directory / "programs"
        programs.mkdir(exist_ok=True)
        self.calls = programs / "calls"
        command = f'echo "$*" >>{self.calls}; exec {sys.executable} -m mount.cli.main "$@"'
        for name, text in {
            "tierfs": f"#!/bin/bash\n{command}\n",
            "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames gpu[1-2]" ] && printf "gpu1\\ngpu2\\n"\n',
            "logger": '#!/bin/bash\nshift 3\necho "$*" >>"$LOGGED"\n',
        }.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        values = {"INSTANCE": mounted.name, "MOUNTPOINT": str(mounted.place), "EPILOG_TIMEOUT": "20", **settings}
        # The last word has the file of settings; so this machine's own tierfs and scontrol are not what is run.
        lines = [f"{name}={value}" for name, value in values.items()] + [f"PATH={programs}:$PATH"]
        configuration = programs / "slurm.conf"
        configuration.write_text("\n".join(lines) + "\n")
        self.environment = package_environment() | {
            "TIERFS_SLURM_CONF": str(configuration),
            "LOGGED": str(programs / "logged"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_COMMENT": comment,
            "SLURM_JOB_NODELIST": "gpu[1-2]",
            "SLURMD_NODENAME": "gpu2",
        }

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", SLURM / script], env=self.environment, capture_output=True, text=True, timeout=60, cwd="/"
        )

    @property
    def said(self) -> str:
        logged = Path(self.environment["LOGGED"])
        return logged.read_text() if logged.exists() else ""

    def called(self, command: str) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if line.startswith(command)]


def save(mounted: Rig, namespace: str, step: int) -> None:
    directory = mounted.place / namespace / f"step_{step}"
    directory.mkdir(parents=True)
    for rank in range(4):
        (directory / f"__{rank}_0.bin").write_bytes(os.urandom(2 * MIB))
    assert tierfs("commit", directory).returncode == 0


def in_ram(mounted: Rig, path: str) -> bool:
    said = json.loads(tierfs("stat", mounted.place / path, "--json").stdout)
    return bool(said["tier"] == "ram")


def test_an_epilog_makes_durable_what_a_prolog_brings_back(mounted: Rig) -> None:
    store = mounted.directory / "store"
    mounted.mount(f"object=file://{store}", "persist.policy=demand", "persist.settle_s=0")
    save(mounted, "run1", 5)
    job = Job(mounted, "night shift tierfs=run1:2")
    epilog = job.run("epilog.sh")
    assert epilog.returncode == 0, epilog.stderr
    assert (store / "run1/step_5/.tierfs/manifest.json").exists(), epilog.stderr
    assert tierfs("evict", mounted.place / "run1/step_5").returncode == 0
    assert not in_ram(mounted, "run1/step_5/__2_0.bin")
    prolog = job.run("prolog.sh")
    assert prolog.returncode == 0, prolog.stderr
    for rank in (2, 3):  # the second node's
        wait_until(lambda: in_ram(mounted, f"run1/step_5/__{rank}_0.bin"), "it is brought")  # noqa: B023
    assert not in_ram(mounted, "run1/step_5/__0_0.bin"), "the first node's ranks load that"


def test_a_prolog_mounts_and_says_so_where_it_can_not(mounted: Rig) -> None:
    if Path("/run/systemd/system").exists():
        pytest.skip("systemd starts the mount here, which test_systemd sees")
    job = Job(mounted, "")
    broken = mounted.directory / "programs/tierfs"
    real = broken.read_text()
    broken.write_text("#!/bin/bash\nexit 1\n")
    failed = job.run("prolog.sh")
    assert failed.returncode == 1 and "can't be mounted" in job.said
    configuration = f"runtime_dir = '{mounted.parent}'\nsize = '64MiB'\n[ram]\nballast = 'off'\n"
    (mounted.directory / "tierfs.toml").write_text(configuration)
    job.environment["TIERFS_CONFIG"] = str(mounted.directory / "tierfs.toml")
    broken.write_text(real)
    done = job.run("prolog.sh")
    assert done.returncode == 0 and mounted.is_mounted(), done.stderr
    assert job.run("prolog.sh").returncode == 0
    assert len(job.called("mount ")) == 1, "it is mounted once"


def test_only_what_is_the_users_own_is_taken_from_a_comment(mounted: Rig) -> None:
    mounted.mount()
    for name in ("mine", "theirs"):
        save(mounted, name, 1)
    shutil.chown(mounted.place / "theirs", 65534)
    (mounted.directory / "owned").mkdir()
    evil = f"$(touch{mounted.directory}/owned/a) ; tierfs=../etc,/etc,theirs,gone,mine:0,mine;touch,*,mine tierfs="
    job = Job(mounted, evil)
    done = job.run("prolog.sh")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: job.called("prefetch"), "it is brought")
    assert job.called("prefetch") == [f"prefetch {mounted.place}/mine/latest"]
    assert "theirs is not of this job's user" in job.said and "gone is not there yet" in job.said
    assert job.said.count("no namespace: ") == 5, job.said
    assert not list((mounted.directory / "owned").iterdir())


def test_an_epilog_fails_where_a_node_would_take_the_only_copy_with_it(mounted: Rig) -> None:
    mounted.mount()
    job = Job(mounted, "", EPILOG="drain")
    done = job.run("epilog.sh")
    assert done.returncode == 1 and "holds what no other has" in job.said, "alone, nobody can take it"
    assert Job(mounted, "", EPILOG="none").run("epilog.sh").returncode == 0
    assert tierfs("umount", mounted.place).returncode == 0
    assert job.run("epilog.sh").returncode == 0, "without a mount there is nothing to drain"


def test_the_example_has_the_defaults() -> None:
    def assignments(text: str) -> dict[str, str]:
        lines = [line.split("#")[0].strip() for line in text.splitlines()]
        pairs = [line.split("=", 1) for line in lines if "=" in line and line.split("=")[0].isupper()]
        return {name: value for name, value in pairs if name != "PATH"}

    common = (SLURM / "common.sh").read_text().split("\n\n")[1:]
    assert assignments((SLURM / "slurm.conf.example").read_text()) == assignments(
        "\n".join(common).split("settings=")[0]
    )


def test_scripts_have_nothing_that_shellcheck_knows() -> None:
    found = [*SLURM.glob("*.sh"), *(repository() / "deploy/container").glob("*.sh")]
    assert len(found) >= 3
    command = [str(Path(sys.executable).parent / "shellcheck"), "-x", *map(str, found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
