"""`tierfs completion bash|zsh|fish`: completion scripts made from the parser, so that they can't be out of date."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def add_commands(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script for a shell",
        description="Prints a completion script. Without it the command works the same; with it TAB knows its words.",
        epilog="examples:\n"
        "  tierfs completion bash > /etc/bash_completion.d/tierfs\n"
        '  tierfs completion zsh > "${fpath[1]}/_tierfs"\n'
        "  tierfs completion fish > ~/.config/fish/completions/tierfs.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script to print")
    parser.set_defaults(run=run_completion)


def run_completion(arguments: argparse.Namespace) -> int:
    from mount.cli.main import build_parser

    commands = list(walk(build_parser()))
    write = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[arguments.shell]
    print(write(commands), end="")
    return 0


@dataclass(frozen=True)
class Option:
    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One level of the command line: `words` lead to it, ("config", "show"); the top has none."""

    words: tuple[str, ...]
    commands: dict[str, str]  # name -> help
    options: tuple[Option, ...]
    choices: tuple[str, ...]  # of positional arguments; none means paths

    @property
    def key(self) -> str:
        return " ".join(self.words)

    @property
    def candidates(self) -> list[str]:
        return [*self.commands, *self.choices, *(name for option in self.options for name in option.names)]


def walk(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """Every level of the command line, the top first. argparse has no public way to ask for its parts."""
    commands: dict[str, str] = {}
    below: dict[str, argparse.ArgumentParser] = {}
    options: list[Option] = []
    choices: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            commands = {name: helps[name] for name in below if name in helps}  # those without help are not shown
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            values = tuple(str(choice) for choice in action.choices or ())
            options.append(Option(tuple(action.option_strings), action.help or "", action.nargs != 0, values))
        else:
            choices += [str(choice) for choice in action.choices or ()]
    yield Command(words, commands, tuple(options), tuple(choices))
    for name in commands:
        yield from walk(below[name], (*words, name))


def bash_script(commands: list[Command]) -> str:
    """For bash 4 and later. Where no word fits, bash completes paths."""
    lines = [
        "# bash completion of tierfs; made by `tierfs completion bash`",
        "_tierfs() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" key="" words="" at',
        "    COMPREPLY=()",
        "    for ((at = 1; at < COMP_CWORD; at++)); do",
        '        case "${key:+$key }${COMP_WORDS[at]}" in',
        f'            {_alternatives(commands)}) key="${{key:+$key }}${{COMP_WORDS[at]}}" ;;',
        "        esac",
        "    done",
        '    case "$key $before" in',
    ]
    for command in commands:
        for option in command.options:
            if option.takes_value:
                patterns = "|".join(_quote(f"{command.key} {name}") for name in option.names)
                values = " ".join(option.choices)
                lines.append(f'        {patterns}) COMPREPLY=($(compgen -W {_quote(values)} -- "$current")); return ;;')
    lines += ["    esac", '    case "$key" in']
    for command in commands:
        lines.append(f"        {_quote(command.key)}) words={_quote(' '.join(command.candidates))} ;;")
    lines += [
        "    esac",
        "    # words of commands and choices come first; paths only where there are none",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "    if [[ -z $current && $words == -* ]]; then COMPREPLY=(); fi",
        "}",
        "complete -o default -F _tierfs tierfs",
    ]
    return "\n".join(lines) + "\n"


def zsh_script(commands: list[Command]) -> str:
    lines = [
        "#compdef tierfs",
        "# zsh completion of tierfs; made by `tierfs completion zsh`",
        "_tierfs() {",
        '    local key="" before="${words[CURRENT-1]}" at',
        "    local -a found",
        "    for ((at = 2; at < CURRENT; at++)); do",
        '        case "${key:+$key }${words[at]}" in',
        f'            {_alternatives(commands)}) key="${{key:+$key }}${{words[at]}}" ;;',
        "        esac",
        "    done",
        '    case "$key $before" in',
    ]
    for command in commands:
        for option in command.options:
            if option.takes_value:
                patterns = "|".join(_quote(f"{command.key} {name}") for name in option.names)
                action = f"compadd -- {' '.join(map(_quote, option.choices))}" if option.choices else "_files"
                lines.append(f"        {patterns}) {action}; return ;;")
    lines += ["    esac", '    case "$key" in']
    for command in commands:
        described = [*command.commands.items(), *((choice, "") for choice in command.choices)]
        described += [(name, option.help) for option in command.options for name in option.names]
        entries = " ".join(_quote(f"{name}:{text}" if text else name) for name, text in described)
        paths = "" if command.commands or command.choices else "; [[ ${words[CURRENT]} == -* ]] || { _files; return; }"
        lines.append(f"        {_quote(command.key)}) found=({entries}){paths} ;;")
    lines += [
        "    esac",
        "    _describe 'tierfs' found",
        "}",
        'if [[ "$funcstack[1]" = "_tierfs" ]]; then _tierfs "$@"; else compdef _tierfs tierfs; fi',
    ]
    return "\n".join(lines) + "\n"


def fish_script(commands: list[Command]) -> str:
    lines = ["# fish completion of tierfs; made by `tierfs completion fish`"]
    for command in commands:
        condition = _fish_condition(command)
        offered = [*command.commands.items(), *((choice, "") for choice in command.choices)]
        for name, text in offered:
            lines.append(f"complete -c tierfs -f -n {_quote(condition)} -a {_quote(name)} -d {_quote(text)}")
        for option in command.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = f" -x -a {_quote(' '.join(option.choices))}" if option.choices else " -r" * option.takes_value
            lines.append(f"complete -c tierfs -n {_quote(condition)} {names}{value} -d {_quote(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_condition(command: Command) -> str:
    if not command.words:
        return "__fish_use_subcommand"
    seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
    others = f"; and not __fish_seen_subcommand_from {' '.join(command.commands)}" if command.commands else ""
    return seen + others


def _alternatives(commands: list[Command]) -> str:
    return "|".join(_quote(command.key) for command in commands if command.words)


def _quote(text: str) -> str:
    return shlex.quote(text)
