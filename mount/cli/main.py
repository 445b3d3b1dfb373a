"""The `tierfs` command: its parser, the choice of the command, and the one place that prints errors.

Each command module has `add_commands(subparsers)`, and sets `run` of its parsers to a function from the parsed
arguments to an exit code. Modules import what they need inside those functions, so that `tierfs --help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMAND_MODULES = (
    "mount.cli.mount_commands",
    "mount.cli.upgrade_command",
    "mount.cli.read_commands",
    "mount.cli.top_command",
    "mount.cli.step_commands",
    "mount.cli.object_commands",
    "mount.cli.cluster_commands",
    "mount.cli.copy_commands",
    "mount.cli.config_commands",
    "mount.cli.doctor_command",
    "mount.cli.sizing_command",
    "mount.cli.verbs_commands",
    "mount.cli.completion",
)

DESCRIPTION = (
    "A file system for training checkpoints: they land in RAM, are copied to other nodes' RAM, and whole steps go to "
    "object storage."
)
EPILOG = """\
examples:
  tierfs mount /ckpt -o size=50%                mount; then let the training job write below /ckpt
  tierfs status /ckpt                           the mount, its steps and what is wrong, if anything is
  tierfs top                                    the same, live: what moves, how fast, and what lags behind
  tierfs verify /ckpt/run1/step_500             read a step again and compare it with its checksums
  tierfs pin /ckpt/run1/step_500                never drop this step from RAM
  tierfs flush --all --wait                     send every complete step to the object tier, and wait for it
  tierfs umount /ckpt                           unmount; the next mount finds the steps again

exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 mounted but with problems, 4 not mounted
TIERFS_DEBUG=1 shows where an error comes from.
"""

INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE: as the shell reports programs that these end


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line that says where to read on."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    @property
    def commands(self) -> list[str]:
        """The names of the commands one level below."""
        return [
            name
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for name in action.choices
        ]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"tierfs: {message}; see `{self.prog} --help`\n")


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="tierfs", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    for module in COMMAND_MODULES:
        try:
            importlib.import_module(module).add_commands(subparsers)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Never lets an exception through."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse, after it printed help or an error
        return stop.code if isinstance(stop.code, int) else 1
    except BrokenPipeError:
        # The reader has seen enough. Python flushes stdout once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return report_error(error)


def report_error(error: Exception) -> int:
    """Prints one line for the error, or its traceback with TIERFS_DEBUG, and returns its exit code."""
    from tierfs.errors import TierfsError

    if os.environ.get("TIERFS_DEBUG"):
        import traceback

        traceback.print_exception(error)
    code = 1
    if isinstance(error, TierfsError):
        code, message = error.exit_code, error.message
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        message = f"internal error: {type(error).__name__}: {error}; TIERFS_DEBUG=1 shows where"
    print(f"tierfs: {_one_line(message)}", file=sys.stderr)
    return code


def _run(arguments: Sequence[str]) -> int:
    parser = build_parser()
    _refuse_unknown_command(parser, arguments)
    parsed = parser.parse_args(arguments)
    if parsed.version:
        from tierfs import __version__

        print(f"tierfs {__version__}")
        return 0
    run = getattr(parsed, "run", None)
    if run is None:
        parser.print_help(sys.stderr)
        return 2
    return int(run(parsed))


def _refuse_unknown_command(parser: Parser, arguments: Sequence[str]) -> None:
    """Says which command was probably meant, where argparse would list all of them."""
    word = next((word for word in arguments if not word.startswith("-")), None)
    if word is None or word in parser.commands:
        return
    near = difflib.get_close_matches(word, parser.commands, n=1)
    parser.error(f"no command {word!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _one_line(text: str) -> str:
    return " ".join(text.split("\n")).strip()


if __name__ == "__main__":
    sys.exit(main())
