"""Writes docs/commands.md from the parser: `python -m mount.cli.commands_reference > docs/commands.md`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mount.cli.main import build_parser

INTRODUCTION = """\
# Commands

<!-- Made from the parser by `python -m mount.cli.commands_reference > docs/commands.md`; don't edit it here. -->

What `tierfs COMMAND --help` prints, on one page. As a manual page it is [man/tierfs.1](man/tierfs.1): `man tierfs`
where the package is installed, `man -l docs/man/tierfs.1` in a checkout. What scripts may rely on, the exit codes and
the fields of `--json`, is in [cli.md](cli.md); the settings that `-o` takes are in [settings.md](settings.md).
"""


@dataclass(frozen=True)
class Argument:
    """`shown` is as in a usage line: `PATH...`, `--timeout S`."""

    shown: str
    help: str


@dataclass(frozen=True)
class CommandPage:
    """One command with all that its help says. `words` lead to it: ("config", "show")."""

    words: tuple[str, ...]
    summary: str
    usage: str
    description: str
    arguments: tuple[Argument, ...]
    options: tuple[Argument, ...]
    epilog: str

    @property
    def name(self) -> str:
        return " ".join(("tierfs", *self.words))


def command_pages() -> Iterator[CommandPage]:
    """Every command that does something, in the order of `tierfs --help`; those of `config` after it."""
    yield from _pages(build_parser(), (), "")


def _pages(parser: argparse.ArgumentParser, words: tuple[str, ...], summary: str) -> Iterator[CommandPage]:
    # argparse has no public way to ask for its parts; its own usage line differs by Python's version and terminal.
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if words:
        shown = [each for each in parser._actions if each.help != argparse.SUPPRESS and each not in groups]
        options = [each for each in shown if each.option_strings and "--help" not in each.option_strings]
        arguments = [each for each in shown if not each.option_strings]
        usage = ["tierfs", *words, *_in_usage(parser, options)]
        usage += [_positional(each) for each in arguments] + ["ACTION ..."] * len(groups)
        yield CommandPage(
            words,
            summary,
            " ".join(usage),
            (parser.description or "").strip(),
            tuple(Argument(_positional(each), each.help or "") for each in arguments),
            tuple(Argument(_option(each), each.help or "") for each in options),
            (parser.epilog or "").strip(),
        )
    for group in groups:
        summaries = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, below in group.choices.items():
            if name in summaries:
                yield from _pages(below, (*words, name), summaries[name])


def _in_usage(parser: argparse.ArgumentParser, options: list[argparse.Action]) -> Iterator[str]:
    """Options that must be given have no brackets; of those in parentheses it is one."""
    one_of = {id(each): group for group in parser._mutually_exclusive_groups for each in group._group_actions}
    for option in options:
        group = one_of.get(id(option))
        if group is None:
            shown = _option(option, all_names=False)
            yield shown if option.required else f"[{shown}]"
        elif group._group_actions[0] is option:
            shown = " | ".join(_option(each, all_names=False) for each in group._group_actions)
            yield f"({shown})" if group.required else f"[{shown}]"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "|".join(str(choice) for choice in action.choices)
    return str(action.metavar or action.dest.upper())


def _option(action: argparse.Action, *, all_names: bool = True) -> str:
    names = ", ".join(action.option_strings) if all_names else action.option_strings[-1]
    if action.nargs == 0:
        return names
    return f"{names} [{_value(action)}]" if action.nargs == "?" else f"{names} {_value(action)}"


def _positional(action: argparse.Action) -> str:
    value = _value(action)
    return {"?": f"[{value}]", "*": f"[{value}...]", "+": f"{value}..."}.get(str(action.nargs), value)


def commands_reference() -> str:
    """The whole page."""
    pages = list(command_pages())
    parts = [INTRODUCTION, "\n".join(f"- [`{page.name}`](#{_anchor(page.name)}): {page.summary}" for page in pages)]
    return "\n".join([*parts, "", *(_section(page) for page in pages)])


def _section(page: CommandPage) -> str:
    parts = [f"## {page.name}\n", f"```\n{page.usage}\n```\n", f"{one_paragraph(page.description)}\n"]
    if rows := [*page.arguments, *page.options]:
        parts.append("| | |\n|---|---|")
        parts += [f"| `{_cell(row.shown)}` | {_cell(row.help)} |" for row in rows]
        parts.append("")
    if page.epilog:
        parts.append(f"```\n{page.epilog}\n```\n")
    return "\n".join(parts)


def one_paragraph(text: str) -> str:
    """Descriptions are broken for terminals; a reader of the page breaks them anew."""
    return " ".join(text.split("\n"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    print(commands_reference(), end="")
