"""The pages that are made from the parser are what it says now, and can be read by what reads them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from mount.cli.commands_reference import command_pages, commands_reference
from mount.cli.completion import walk
from mount.cli.main import build_parser
from mount.cli.man_page import man_page
from tests.conftest import repository

DOCS = repository() / "docs"


def test_the_commands_reference_is_up_to_date() -> None:
    written = (DOCS / "commands.md").read_text()
    assert written == commands_reference(), (
        "run `make docs` (python -m mount.cli.commands_reference > docs/commands.md)"
    )


def test_the_manual_page_is_up_to_date() -> None:
    written = (DOCS / "man" / "tierfs.1").read_text()
    assert written == man_page(), "run `make docs` (python -m mount.cli.man_page > docs/man/tierfs.1)"


def test_they_have_every_command_with_every_option() -> None:
    page, manual = commands_reference(), man_page().replace("\\-", "-")
    commands = [command for command in walk(build_parser()) if command.words]
    assert [each.words for each in command_pages()] == [command.words for command in commands]
    for command in commands:
        assert f"\n## tierfs {command.key}\n" in page
        assert f"\n.SS tierfs {command.key}\n" in manual
        section = page.split(f"\n## tierfs {command.key}\n")[1].split("\n## ")[0]
        for name in (name for option in command.options for name in option.names):
            assert name in section or name in ("-h", "--help"), f"{name} of {command.key}"


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_the_manual_page_is_sound_roff() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", DOCS / "man" / "tierfs.1"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "tierfs umount --no-flush /ckpt     now; what is owed" in done.stdout
