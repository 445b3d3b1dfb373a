"""Where settings come from, which source wins, and what is said of a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tierfs.errors import SettingsError
from tierfs.settings import Settings, setting_keys
from tierfs.settings_sources import (
    check_file,
    describe_settings,
    load_settings,
    settings_from_json,
    settings_to_json,
    split_mount_options,
)

MEMORY = 16 << 30


def load(
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    **more: Any,
) -> Settings:
    more.setdefault("config_directory", Path("/nonexistent"))
    return load_settings(config, environ or {}, options, flags or {}, memory_bytes=lambda: MEMORY, **more)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str, name: str = "x.toml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refused(**sources: Any) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(**sources)
    assert caught.value.exit_code == 2
    return caught.value


def test_without_sources_there_are_defaults_and_half_the_memory() -> None:
    settings = load()
    assert settings.size == MEMORY // 2
    assert settings.retention.ram_steps == 2
    assert settings.sources == {}
    assert settings.warnings == []


def test_file_then_environment_then_options_then_flags(toml: Any) -> None:
    path = toml('size = "1G"\npassthrough = "off"\n[retention]\nram_steps = 5\n[log]\nlevel = "debug"\n')
    environ = {"TIERFS_SIZE": "2G", "TIERFS_RETENTION_RAM_STEPS": "6", "TIERFS_LOG_LEVEL": "error"}
    settings = load(path, environ, ["size=3G,retention.ram_steps=7"], {"size": "4G"})
    assert (settings.size, settings.retention.ram_steps) == (4 << 30, 7)
    assert (settings.log.level, settings.passthrough) == ("error", "off")
    assert settings.sources == {
        "size": "command line",
        "retention.ram_steps": "-o",
        "log.level": "environment TIERFS_LOG_LEVEL",
        "passthrough": str(path),
    }


def test_the_options_of_the_docs_work() -> None:
    settings = load(options=["name=N,size=3G,ram.ballast=off", "steps.latest=hidden,retention.ram_steps=3,ram.noswap"])
    assert (settings.name, settings.size, settings.ram.ballast) == ("N", 3 << 30, "off")
    assert (settings.steps.latest, settings.retention.ram_steps, settings.ram.noswap) == ("hidden", 3, True)


def test_mount_options_that_concern_others_are_kept_apart() -> None:
    split = split_mount_options(
        ["rw,nosuid,nodev,noatime,_netdev,nofail,x-systemd.automount,X-mount.mkdir=0755,user,size=1G,,allow_other"]
    )
    assert split.settings == (("size", "1G"), ("allow_other", "on"))
    assert split.kernel == ("rw", "nosuid", "nodev", "noatime")
    assert load(options=["defaults,allow_other,ro"]).allow_other == "on"


def test_a_quoted_option_may_hold_commas() -> None:
    settings = load(options=['steps.patterns="s(?P<step>[0-9]{1,9}) t(?P<step>.)",size=1G'])
    assert settings.steps.patterns == ["s(?P<step>[0-9]{1,9})", "t(?P<step>.)"]
    assert settings.size == 1 << 30
    assert "never closed" in str(refused(options=['name="N,size=1G']))


def test_every_error_names_key_value_remedy_and_source(toml: Any) -> None:
    path = toml('size = "3Q"\n')
    error = refused(config=path)
    assert error.key == "size"
    assert str(error) == (
        f'size = "3Q": not a size; write bytes or a number with KiB, MiB, GiB, TiB or % (from {path})'
    )
    error = refused(environ={"TIERFS_RAM_BALLAST": "much"})
    assert error.key == "ram.ballast"
    assert str(error) == (
        'ram.ballast = "much": not a size; write auto, off, or bytes or a number with KiB, MiB, GiB, TiB or % '
        "(from the environment variable TIERFS_RAM_BALLAST)"
    )


@pytest.mark.parametrize(
    ("option", "key", "said"),
    [
        ("sise=3G", "sise", 'did you mean "size"?'),
        ("ballast=off", "ballast", 'did you mean "ram.ballast"?'),
        ("ram.balast=off", "ram.balast", 'did you mean "ram.ballast"?'),
        ("ram=3", "ram", "is a section"),
        ("qqqqqq=1", "qqqqqq", "config show"),
        ("=3G", "", "unknown setting"),
        ("namespaces.run.log.level=debug", "namespaces.run.log.level", "unknown"),
        ("passthrough=maybe", "passthrough", "must be one of auto, off"),
        ("durability.fsync=disk", "durability.fsync", "must be one of ram, replica"),
        ("ram.noswap=perhaps", "ram.noswap", "write true or false"),
        ("retention.ram_steps=0", "retention.ram_steps", "at least 1"),
        ("retention.ram_steps=two", "retention.ram_steps", "not a whole number"),
        ("retention.ram_max_steps=1", "retention.ram_max_steps", "contradicts"),
        ("size=4K", "size", "at least 1MiB"),
        ("size=120%", "size", "not a size"),
        ("steps.sweep_after_s=soon", "steps.sweep_after_s", "not a duration"),
        ("steps.patterns=step_[0-9]+", "steps.patterns", "no group `step`"),
        ("steps.patterns=step_(", "steps.patterns", "not a regular expression"),
        ("steps.markers=done=perhaps", "steps.markers", "one of dcp, dcp-per-rank, close, off"),
        ("log.directory=logs", "log.directory", "absolute path"),
        ("name=../x", "name", "not a name"),
        ("object=ftp://x", "object", "file:///path or s3://bucket/prefix"),
        ("object=file:///", "object", "file:///path or s3://bucket/prefix"),
        ("object=file:///a/../b", "object", "must not hold '..'"),
        ("object=s3://bucket/a//b", "object", "must not hold '..'"),
        ("s3.endpoint_url=localhost:8333", "s3.endpoint_url", "http://host:port"),
        ("catalog=http://etcd:2379", "catalog", "write etcd://host:port"),
        ("cluster.listen=7117", "cluster.listen", "write HOST:PORT"),
        ("cluster.lease_s=0", "cluster.lease_s", "at least 1"),
        ("persist.policy=every", "persist.policy", "needs persist.every_steps or persist.every_s"),
        (
            "persist.every_steps=2,namespaces.a.persist.every_steps=0,namespaces.a.persist.policy=every",
            'namespaces."a".persist.policy',
            "needs",
        ),
    ],
)
def test_a_wrong_option_is_refused_with_advice(option: str, key: str, said: str) -> None:
    error = refused(options=[option])
    assert error.key == key
    assert said in str(error)


def test_a_file_is_checked_for_kinds_sections_and_syntax(toml: Any, tmp_path: Path) -> None:
    assert "not a size" in str(refused(config=toml("size = true")))
    assert "is a section; write [ram]" in str(refused(config=toml("ram = 3")))
    assert 'did you mean "steps' in str(refused(config=toml("[step]\nlatest = 'off'")))
    assert "not valid TOML" in str(refused(config=toml("size = = 3")))
    assert "cannot read" in str(refused(config=tmp_path / "missing.toml"))
    assert "not a text" in str(refused(config=toml("name = 3")))
    assert 'namespaces."a".log' in str(refused(config=toml('[namespaces."a".log]\nlevel = "debug"')))


def test_values_may_be_toml_kinds_or_texts(toml: Any) -> None:
    settings = check_file(
        toml(
            'size = 1073741824\nallow_other = true\npassthrough = false\n[ram]\nballast = false\nrunway_bytes = "1M"\n'
            "[steps]\ncomplete_when_idle_s = 5\nsweep_after_s = '2h'\n"
        )
    )
    assert (settings.size, settings.allow_other, settings.passthrough) == (1 << 30, "on", "off")
    assert (settings.ram.ballast, settings.ram.runway_bytes) == ("off", 1 << 20)
    assert (settings.steps.complete_when_idle_s, settings.steps.sweep_after_s) == (5.0, 7200.0)
    assert load(options=["passthrough=on"]).passthrough == "auto"
    assert load(options=["ram.ballast=1G"]).ram.ballast == str(1 << 30)
    assert load(options=["size=25%"]).size == MEMORY // 4


def test_markers_add_to_the_default_ones_and_off_takes_one_out(toml: Any) -> None:
    settings = load(
        toml('[steps.markers]\ndone = "close"\n"trainer_state.json" = "off"\n'), {"TIERFS_STEPS_MARKERS": "x=dcp"}
    )
    assert settings.steps.markers[".metadata"] == "dcp"
    assert settings.steps.markers["done"] == "close"
    assert settings.steps.markers["x"] == "dcp"
    assert "trainer_state.json" not in settings.steps.markers
    assert "trainer_state.json" in Settings().steps.markers


def test_the_default_file_is_the_instances_own_then_the_common_one(tmp_path: Path) -> None:
    (tmp_path / "tierfs.toml").write_text('size = "1G"')
    assert load(config_directory=tmp_path, default_name="ckpt").size == 1 << 30
    (tmp_path / "ckpt.toml").write_text('size = "2G"')
    by_mount_point = load(config_directory=tmp_path, default_name="ckpt")
    assert (by_mount_point.size, by_mount_point.name) == (2 << 30, "ckpt")
    assert load(options=["name=ckpt"], config_directory=tmp_path).size == 2 << 30
    assert load(options=["name=other"], config_directory=tmp_path, default_name="ckpt").size == 1 << 30
    (tmp_path / "third.toml").write_text('size = "3G"')
    assert load(environ={"TIERFS_CONFIG": str(tmp_path / "third.toml")}, config_directory=tmp_path).size == 3 << 30


def test_namespace_sections_are_laid_over_in_order(toml: Any) -> None:
    path = toml(
        '[retention]\nram_steps = 3\n[namespaces."run*".retention]\nram_steps = 5\n'
        '[namespaces."run*".steps.markers]\ndone = "close"\n".metadata" = "off"\n'
        '[namespaces."run1"]\nsteps.latest = "off"\nretention.ram_steps = 9\n'
    )
    settings = load(path, options=["namespaces.team/a.b.retention.ram_steps=4"])
    assert settings.for_namespace("other").retention.ram_steps == 3
    assert settings.for_namespace("run2").retention.ram_steps == 5
    assert settings.for_namespace("run2/sub").steps.markers["done"] == "close"
    run1 = settings.for_namespace("run1")
    assert (run1.retention.ram_steps, run1.steps.latest, run1.durability.fsync) == (9, "off", "ram")
    assert ".metadata" not in run1.steps.markers
    assert ".metadata" in settings.steps.markers
    assert settings.for_namespace("team/a.b").retention.ram_steps == 4
    error = refused(config=toml('[namespaces.a.retention]\nram_steps = "x"'))
    assert error.key == 'namespaces."a".retention.ram_steps'


def test_json_gives_an_equal_object_and_passes_over_what_it_does_not_know(toml: Any) -> None:
    path = toml('[namespaces."a".retention]\nram_steps = 5\n[log]\ndirectory = "/var/log/tierfs"\n')
    settings = load(path, {"TIERFS_RUNTIME_DIR": "/run/x"}, ["name=N,size=1G,object=file:///srv"])
    again = settings_from_json(settings_to_json(settings))
    assert dataclasses.asdict(again) == dataclasses.asdict(settings)
    assert isinstance(again.log.directory, Path)
    assert again.warnings == settings.warnings
    assert again.sources["size"] == "-o"
    assert settings_from_json('{"size": 5, "of_the_future": 1}').size == 5
    with pytest.raises(SettingsError, match="mount it again"):
        settings_from_json("{")


def test_warnings_tell_of_slips() -> None:
    settings = load(environ={"TIERFS_SZIE": "1G", "TIERFS_SERVICE_HOST": "10.0.0.1", "TIERFS_DEBUG": "1"})
    assert settings.warnings == [
        "the environment variable TIERFS_SZIE is no setting and is ignored; did you mean TIERFS_SIZE?"
    ]


def test_the_description_lists_every_setting_with_its_source() -> None:
    rows = {row["key"]: row for row in describe_settings(load(options=["size=3G,namespaces.run*.steps.latest=off"]))}
    assert rows["size"] == {"key": "size", "value": 3 << 30, "text": "3GiB", "source": "-o"}
    assert rows["retention.ram_steps"]["source"] == "default"
    assert rows['namespaces."run*".steps.latest']["value"] == "off"
    assert set(rows) >= {key.path for key in setting_keys()} - {"debug_crash_at"}
    assert "debug_crash_at" not in rows
    assert load(options=["debug_crash_at=seal:2"]).debug_crash_at == "seal:2"


def test_no_two_settings_share_an_environment_variable_and_each_is_explained() -> None:
    keys = setting_keys()
    assert len({key.variable for key in keys}) == len(keys)
    assert all(len(key.doc) > 10 for key in keys)
