"""Where settings come from, and which source wins. `tierfs.settings_values` says what each value may be.

Later sources win: the defaults, the TOML file, the environment, `-o` options, flags of the command line. Each
value's source is remembered in `Settings.sources` (absent: the default).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tierfs.errors import SettingsError
from tierfs.settings import (
    NAMESPACE_SECTIONS,
    SettingKey,
    Settings,
    merge_table,
    setting_keys,
)
from tierfs.settings_archive import check_archive
from tierfs.settings_disk import OF_THE_INSTANCE
from tierfs.settings_turns import check_turns
from tierfs.settings_values import INSTANCE_NAME, memory_size, parse_value, toml
from tierfs.units import format_size_exactly, parse_share

CONFIG_DIRECTORY = Path("/etc/tierfs")
DEFAULT_SIZE = "50%"

# Options of mount(8), fstab(5) and libfuse that say nothing about tierfs. Some of them are for mount(2).
_FOR_KERNEL = """
    ro rw nosuid suid nodev dev noexec exec noatime atime relatime norelatime strictatime nostrictatime nodiratime
    diratime lazytime nolazytime nosymfollow symfollow sync async dirsync
"""
_FOR_OTHERS = """
    defaults auto noauto user nouser users owner group nofail _netdev mand nomand iversion noiversion
    default_permissions nonempty big_writes comment uhelper helper fsname subtype max_read blksize context
"""
_KERNEL_OPTIONS = frozenset(_FOR_KERNEL.split())
_IGNORED_OPTIONS = frozenset(_FOR_OTHERS.split())

# Variables that start with TIERFS_ and are no settings.
_OTHER_VARIABLES = frozenset(("TIERFS_CONFIG", "TIERFS_DEBUG"))

_SECTIONS = tuple(dict.fromkeys(key.section for key in setting_keys() if key.section))
_KEYS: Mapping[str, SettingKey] = {key.path: key for key in setting_keys()}


class MountOptions(NamedTuple):
    """`-o` options sorted by whom they concern."""

    settings: tuple[tuple[str, str], ...]  # (key, value); an option without `=` has the value "on"
    kernel: tuple[str, ...]  # for mount(2): ro, nosuid, noatime, ...


def load_settings(
    config: Path | None,
    environ: Mapping[str, str],
    options: Sequence[str],
    flags: Mapping[str, str],
    *,
    default_name: str = "",
    config_directory: Path = CONFIG_DIRECTORY,
    memory_bytes: Callable[[], int] | None = None,
) -> Settings:
    """The settings of an instance, complete: `size` is in bytes, also when nobody set it.

    `options` are the arguments of `-o`, each with commas; `flags` map a key such as `ram.ballast` to its text.
    Without `config` (and TIERFS_CONFIG) the file is `<config_directory>/NAME.toml`, else `tierfs.toml` there, else
    none; NAME is the name that the later sources give, else `default_name`. `memory_bytes` says what a percentage
    is of (default: the least of the machine's memory and the control group's limit).
    Raises SettingsError, whose `key` names the setting.
    """
    given = list(_from_environment(environ))
    given += [(key, value, "-o") for key, value in split_mount_options(options).settings]
    given += [(key, value, "command line") for key, value in flags.items()]
    name = next((value for key, value, _ in reversed(given) if key == "name"), default_name)

    settings = Settings()
    for key in setting_keys():
        if key.kind == "table":  # a copy to lay entries over
            _set(settings, key, copy.deepcopy(key.default))
    path = _find_file(config, environ, name, config_directory)
    if path is not None:
        _apply_file(settings, path, memory_bytes)
    for dotted, value, source in given:
        _apply(settings, dotted, value, source, memory_bytes)
    if not settings.name and default_name:
        _apply(settings, "name", default_name, "mount point", memory_bytes)
        settings.sources["name"] = "mount point"
    if not settings.size:
        settings.size = parse_share(DEFAULT_SIZE, memory_size(memory_bytes))
    settings.warnings += _unknown_variables(environ)
    _check_together(settings)
    return settings


def check_file(path: Path, *, memory_bytes: Callable[[], int] | None = None) -> Settings:
    """The settings that this file alone gives. Raises SettingsError."""
    return load_settings(path, {}, (), {}, memory_bytes=memory_bytes)


def split_mount_options(options: Sequence[str]) -> MountOptions:
    """Sorts `a=1,rw,x-foo` into settings and options for mount(2); those that concern neither are dropped.

    A value in double quotes may hold commas, as in mount(8): `steps.patterns="step_(?P<step>[0-9]{1,9})"`.
    """
    settings: list[tuple[str, str]] = []
    kernel: list[str] = []
    for text in options:
        for option in _split_at_commas(text):
            key, equals, value = option.partition("=")
            key = key.strip()
            if key in _KERNEL_OPTIONS and not equals:
                kernel.append(key)
            elif not option.strip() or key in _IGNORED_OPTIONS or key.lower().startswith("x-"):
                continue
            else:
                settings.append((key, value if equals else "on"))
    return MountOptions(tuple(settings), tuple(kernel))


def describe_settings(settings: Settings) -> list[dict[str, Any]]:
    """One row a setting for `tierfs config show`: key, value (plain JSON), text, source. Test settings only if set."""
    rows = []
    for key in setting_keys():
        value = _get(settings, key)
        if key.name.startswith("debug_") and value == key.default:
            continue
        rows.append(_row(key.path, key, value, settings.sources))
    for glob, overrides in settings.namespaces.items():
        for section, values in overrides.items():
            for name, value in values.items():
                dotted = f'namespaces."{glob}".{section}.{name}'
                rows.append(_row(dotted, _KEYS[f"{section}.{name}"], value, settings.sources))
    return rows


def settings_to_json(settings: Settings) -> str:
    """All of it, sources and warnings too, so that `settings_from_json` gives an equal object."""
    return json.dumps(dataclasses.asdict(settings), default=str, ensure_ascii=False, indent=1)


def settings_from_json(text: str) -> Settings:
    """What `settings_to_json` wrote. Keys that this version doesn't know are passed over and missing ones have
    their defaults, since a daemon may be newer or older than the keeper that wrote the file.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"the instance's saved settings are not valid JSON: {error}; mount it again") from error
    settings = Settings()
    for key in setting_keys():
        section = data.get(key.section, {}) if key.section else data
        if key.name in section:
            value = section[key.name]
            _set(settings, key, Path(value) if key.kind == "path" and value is not None else value)
    settings.namespaces = data.get("namespaces", {})
    settings.sources = data.get("sources", {})
    settings.warnings = data.get("warnings", [])
    return settings


# --- sources ---------------------------------------------------------------------------------------------------


def _find_file(config: Path | None, environ: Mapping[str, str], name: str, directory: Path) -> Path | None:
    asked = config or (Path(environ["TIERFS_CONFIG"]) if environ.get("TIERFS_CONFIG") else None)
    if asked is not None:
        return asked
    names = ([f"{name}.toml"] if INSTANCE_NAME.fullmatch(name) else []) + ["tierfs.toml"]
    return next((directory / each for each in names if (directory / each).is_file()), None)


def _apply_file(settings: Settings, path: Path, memory_bytes: Callable[[], int] | None) -> None:
    try:
        data = toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    source = str(path)
    for dotted, value in _flatten(data, source):
        _apply(settings, dotted, value, source, memory_bytes)


def _flatten(data: Mapping[str, Any], source: str) -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if name == "namespaces":
            for glob, overrides in _table(value, name, source).items():
                for section, values in _table(overrides, f'namespaces."{glob}"', source).items():
                    prefix = f'namespaces."{glob}".{section}'
                    if section not in NAMESPACE_SECTIONS:
                        raise _unknown(prefix, source)
                    for key, entry in _table(values, prefix, source).items():
                        yield f"{prefix}.{key}", entry
        elif name in _SECTIONS:
            for key, entry in _table(value, name, source).items():
                yield f"{name}.{key}", entry
        elif name in _KEYS:
            yield name, value
        else:
            raise _unknown(name, source)


def _table(value: Any, dotted: str, source: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(
            f"{dotted} is a section; write [{dotted}] and its settings below it ({_from(source)})", key=dotted
        )
    return value


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for key in _KEYS.values():
        if key.variable in environ:
            yield key.path, environ[key.variable], f"environment {key.variable}"


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Only those that look like a slip: Kubernetes sets TIERFS_SERVICE_HOST and the like for a service `tierfs`."""
    known = {key.variable for key in _KEYS.values()}
    found = []
    for variable in sorted(environ):
        if variable.startswith("TIERFS_") and variable not in known and variable not in _OTHER_VARIABLES:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if near:
                found.append(
                    f"the environment variable {variable} is no setting and is ignored; did you mean {near[0]}?"
                )
    return found


def _split_at_commas(text: str) -> Iterator[str]:
    current, quoted = "", False
    for character in text:
        if character == '"' and (quoted or current.endswith("=")):
            quoted = not quoted
        elif character == "," and not quoted:
            yield current
            current = ""
        else:
            current += character
    if quoted:
        raise SettingsError(f'-o {text}: a double quote is never closed; write key="value"')
    yield current


# --- one value -------------------------------------------------------------------------------------------------


def _apply(settings: Settings, dotted: str, value: Any, source: str, memory_bytes: Callable[[], int] | None) -> None:
    glob, path = _split_namespace(dotted)
    key = _KEYS.get(path)
    if key is None or (glob is not None and key.section not in NAMESPACE_SECTIONS):
        raise _unknown(dotted, source)
    if glob is not None and path in OF_THE_INSTANCE:
        raise SettingsError(
            f"{dotted}: {path} is of the whole instance, and can't differ by namespace ({_from(source)})", key=dotted
        )
    try:
        parsed = parse_value(key, value, memory_bytes)
    except ValueError as error:
        raise SettingsError(f"{dotted} = {_shown(value)}: {error} ({_from(source)})", key=dotted) from error
    if glob is not None:
        dotted = f'namespaces."{glob}".{path}'
        section = settings.namespaces.setdefault(glob, {}).setdefault(key.section, {})
        below = section.get(key.name, {}) if key.kind == "table" else {}
        section[key.name] = {**below, **parsed} if key.kind == "table" else parsed
    elif key.kind == "table":
        _set(settings, key, merge_table(_get(settings, key), parsed))
    else:
        _set(settings, key, parsed)
    settings.sources[dotted] = source


def _split_namespace(dotted: str) -> tuple[str | None, str]:
    """`namespaces.GLOB.section.name`, where GLOB may be quoted and hold dots, gives (GLOB, `section.name`)."""
    if not dotted.startswith("namespaces."):
        return None, dotted
    parts = dotted.removeprefix("namespaces.").rsplit(".", 2)
    if len(parts) != 3:
        return None, dotted
    return parts[0].strip('"'), f"{parts[1]}.{parts[2]}"


def _check_together(settings: Settings) -> None:
    check_archive(settings)
    check_turns(settings)
    namespaces = ["", *settings.namespaces]
    for glob in namespaces:
        prefix = f'namespaces."{glob}".' if glob else ""
        retention = settings.for_namespace(glob).retention
        if 0 < retention.ram_max_steps < retention.ram_steps:
            raise SettingsError(
                f"{prefix}retention.ram_max_steps = {retention.ram_max_steps} contradicts "
                f"retention.ram_steps = {retention.ram_steps}, which are never evicted; "
                "make it at least as large, or 0",
                key=f"{prefix}retention.ram_max_steps",
            )
        persist = settings.for_namespace(glob).persist
        if persist.policy == "every" and not (persist.every_steps or persist.every_s):
            raise SettingsError(
                f'{prefix}persist.policy = "every" needs persist.every_steps or persist.every_s, or both; '
                "what only `tierfs flush` is to send, is the policy demand",
                key=f"{prefix}persist.policy",
            )


# --- words -----------------------------------------------------------------------------------------------------


def _unknown(dotted: str, source: str) -> SettingsError:
    if dotted in _SECTIONS:
        example = setting_keys(dotted)[0].path
        return SettingsError(
            f'"{dotted}" is a section; name a setting in it, such as {example} ({_from(source)})', key=dotted
        )
    candidates = [key for key in _KEYS if not key.startswith("debug_")]
    last = dotted.rpartition(".")[2]
    near = [key for key in candidates if key.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(dotted, [*candidates, *_SECTIONS, "namespaces"], n=1, cutoff=0.6)
    if not near:
        by_last = {key.rpartition(".")[2]: key for key in candidates}
        near = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)]
    advice = f'; did you mean "{near[0]}"?' if near else "; `tierfs config show` lists all settings"
    return SettingsError(f'unknown setting "{dotted}"{advice} ({_from(source)})', key=dotted)


def _from(source: str) -> str:
    if source.startswith("environment "):
        return f"from the environment variable {source.removeprefix('environment ')}"
    return f"from the {source}" if source in ("command line", "mount point") else f"from {source}"


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _row(dotted: str, key: SettingKey, value: Any, sources: Mapping[str, str]) -> dict[str, Any]:
    plain = str(value) if isinstance(value, Path) else value
    if key.kind in ("size", "share") and isinstance(value, int):
        text = format_size_exactly(value)
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list):
        text = " ".join(value)
    elif isinstance(value, dict):
        text = " ".join(f"{name}={entry}" for name, entry in value.items())
    elif isinstance(value, float):
        text = f"{value:g}s"
    else:
        text = "" if plain is None else str(plain)
    return {"key": dotted, "value": plain, "text": text, "source": sources.get(dotted, "default")}


def _get(settings: Settings, key: SettingKey) -> Any:
    return getattr(getattr(settings, key.section) if key.section else settings, key.name)


def _set(settings: Settings, key: SettingKey, value: Any) -> None:
    setattr(getattr(settings, key.section) if key.section else settings, key.name, value)
