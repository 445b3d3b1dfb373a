"""Addresses of nodes as settings and the catalogue write them: `HOST:PORT`, `[V6]:PORT`, or `:PORT` for all."""

from __future__ import annotations

import ipaddress

from tierfs.errors import SettingsError


def split_address(text: str) -> tuple[str, int]:
    """Host ("" for all) and port. ValueError for anything else."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is not HOST:PORT: an IPv6 address is written in brackets")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_setting(text: str, key: str) -> list[tuple[str, int]]:
    """All addresses of a setting, with commas between; SettingsError."""
    try:
        return [split_address(each) for each in text.split(",") if each.strip()]
    except ValueError as error:
        raise SettingsError(f"{key}: {error}", key=key) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can be behind it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
