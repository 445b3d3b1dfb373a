"""Writes the manual page from the parser: `python -m mount.cli.man_page > docs/man/tierfs.1` (man(7) macros)."""

from __future__ import annotations

from mount.cli.commands_reference import Argument, CommandPage, command_pages, one_paragraph
from mount.cli.main import DESCRIPTION, EPILOG
from tierfs import __version__

HEADER = r""".\" Made from the parser by `python -m mount.cli.man_page > docs/man/tierfs.1`; don't edit it here.
"""

ENVIRONMENT = (
    Argument("TIERFS_CONFIG", "the settings file, where --config names none"),
    Argument(
        "TIERFS_SECTION_KEY",
        "a setting, such as TIERFS_RAM_BALLAST for ram.ballast; it wins over the file, and -o over it",
    ),
    Argument("TIERFS_DEBUG", "1 adds the traceback to an error"),
    Argument("NO_COLOR", "set to anything, it keeps colour off terminals"),
)
FILES = (
    Argument(
        "/etc/tierfs/NAME.toml, /etc/tierfs/tierfs.toml",
        "settings of one instance, and of all that have no file of their own",
    ),
    Argument(
        "/run/tierfs/NAME/",
        "a running instance: its RAM tier, its logs (log/daemon.log, log/keeper.log), its control socket",
    ),
)


def man_page() -> str:
    """The whole page."""
    pages = list(command_pages())
    examples, _, codes = EPILOG.partition("\nexit codes: ")
    parts = [
        HEADER.rstrip(),
        f'.TH TIERFS 1 "" "tierfs {__version__}" "User Commands"',
        ".SH NAME\ntierfs \\- a file system for training checkpoints",
        ".nh\n.ad l",
        ".SH SYNOPSIS\n.B tierfs\n\\fICOMMAND\\fR [\\fIOPTION\\fR...] [\\fIARGUMENT\\fR...]",
        f".SH DESCRIPTION\n{_text(DESCRIPTION)}",
        ".SH COMMANDS",
        *(_command(page) for page in pages),
        f".SH EXIT STATUS\n{_text(codes.splitlines()[0])}",
        ".SH ENVIRONMENT",
        *(_item(each) for each in ENVIRONMENT),
        ".SH FILES",
        *(_item(each) for each in FILES),
        f".SH EXAMPLES\n{_as_is(examples.partition(chr(10))[2])}",
        ".SH SEE ALSO\n.BR mount (8),\n.BR fusermount3 (1),\n.BR fstab (5)",
    ]
    return "\n".join(parts) + "\n"


def _command(page: CommandPage) -> str:
    parts = [
        f".SS {_escaped(page.name)}",
        f".B {_escaped(page.usage)}",
        f".PP\n{_text(one_paragraph(page.description))}",
    ]
    parts += [_item(each) for each in (*page.arguments, *page.options)]
    if page.epilog:
        parts.append(f".PP\n{_as_is(page.epilog)}")
    return "\n".join(parts)


def _item(argument: Argument) -> str:
    return f".TP\n.B {_escaped(argument.shown)}\n{_text(argument.help)}"


def _as_is(text: str) -> str:
    return f".nf\n{_text(text)}\n.fi"


def _text(text: str) -> str:
    r"""Escaped, and a line that begins with what roff takes for a request begins with `\&`."""
    lines = (_escaped(line) for line in text.replace("%%", "%").splitlines())
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


def _escaped(text: str) -> str:
    return (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq").replace("^", "\\(ha")
    )


if __name__ == "__main__":
    print(man_page(), end="")
