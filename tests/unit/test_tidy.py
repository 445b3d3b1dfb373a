"""The rules of the house that a reader can't be asked to check: directions of imports, sizes, names, no unpickling."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tierfs", "mount", "dcp_compat")
MOST_LINES = 500
FORBIDDEN_IMPORTS = {
    "tierfs": {"mount", "dcp_compat", "pyfuse3", "pyfuse3_asyncio", "llfuse", "fuse", "torch"},
    "dcp_compat": {"mount", "pyfuse3"},
    "mount": {"dcp_compat", "torch"},
}
FORBIDDEN_MODULE_WORDS = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "stuff",
    "manager",
    "handler",
    "processor",
}
MODULES_NAMED_BY_OTHERS = {"mount_helper"}  # mount(8) calls /sbin/mount.TYPE a mount helper
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def modules(*packages: str) -> Iterator[Path]:
    for package in packages or PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(full name, line) of every import, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in modules(package)
        for name, line in imported(path)
        if name.partition(".")[0] in FORBIDDEN_IMPORTS[package]
    ]
    assert wrong == []


def test_all_of_tierfs_can_be_imported_without_fuse_and_torch() -> None:
    names = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for path in modules("tierfs")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        f"wrong = loaded & {FORBIDDEN_IMPORTS['tierfs']!r}\n"
        "sys.exit(f'{wrong} were loaded' if wrong else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_modules_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in modules()
        if (count := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_modules_are_named_after_what_they_hold() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in modules()
        if path.stem not in MODULES_NAMED_BY_OTHERS and set(path.stem.split("_")) & FORBIDDEN_MODULE_WORDS
    ]
    assert wrong == []


def test_nothing_in_the_product_unpickles() -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in modules("tierfs", "mount")
        for name, line in imported(path)
        if name.partition(".")[0] in UNPICKLERS
    ]
    assert wrong == []


def test_every_module_and_package_says_what_it_is() -> None:
    without = [str(path.relative_to(ROOT)) for path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert without == []


def test_every_package_is_installed() -> None:
    from tierfs.settings_values import toml

    listed = set(toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in modules() if path.name == "__init__.py"}
    assert listed == found


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by their bare names: of two that are alike it collects one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
