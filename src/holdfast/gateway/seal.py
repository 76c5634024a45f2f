"""Encrypts what a replica stores and no other reader of the database or of a backup may see: variables of sandboxes,
tokens of slots, and kept answers. The key is never in the database.

A sealed value names what it belongs to, so it cannot be opened in another place.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import stat
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

import holdfast
from holdfast.gateway.logs import log
from holdfast.problem_json import Problem

if TYPE_CHECKING:
    from holdfast.gateway.settings import Settings

_MARK, _PLAIN = b"sealed:", b"plain:"
_SUFFIX = ".holdfast-key"


class Seal:
    """``keys``: the first one closes, each of them opens. Without any, values are stored as they are."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None

    def close(self, data: bytes, where: str) -> bytes:
        """``where``: what the value belongs to, unique among all values."""
        if self._fernet is None:
            return _PLAIN + data if data.startswith((_MARK, _PLAIN)) else data
        return _MARK + self._fernet.encrypt(sha256(where.encode()).digest() + data)

    def open(self, stored: bytes, where: str) -> bytes:
        """What was closed; a value from before there was a key is returned as it is. Raises Problem 503."""
        if not stored.startswith(_MARK):
            return stored.removeprefix(_PLAIN)
        try:
            if self._fernet is None:
                raise InvalidToken
            data = self._fernet.decrypt(stored.removeprefix(_MARK))
        except InvalidToken:
            raise Problem(503, "what is stored is sealed with a key that this replica does not have") from None
        if data[:32] != sha256(where.encode()).digest():
            raise Problem(503, "what is stored was sealed for another record")
        return data[32:]


def open_seal(settings: Settings) -> Seal:
    """With the keys of the settings, else on SQLite with one in a file beside the database, made by the first start."""
    if settings.keys or not settings.single:
        return Seal(settings.keys)
    with holdfast.Client(settings.url, schema=settings.schema) as client:
        return Seal(_own_keys(f"{client._database.target}{_SUFFIX}"))


def _own_keys(path: str) -> tuple[str, ...]:
    """Raises HoldfastError for a file that other users can read or have made."""
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise holdfast.HoldfastError(
                    f"the key in {path} must be in a file that belongs to the user of the gateway, of mode 0600: make "
                    "it so if no other user has read it, else give another key with --key-file"
                )
            fcntl.flock(file, fcntl.LOCK_EX)  # two first starts make one key
            if not (text := file.read(1000)):
                text = Fernet.generate_key()
                file.write(text + b"\n")
                file.flush()
                os.fsync(file.fileno())
                log.event("gateway.key", path=path)
        return parse_keys(text.decode("ascii", "replace"))
    except (OSError, ValueError) as error:
        raise holdfast.HoldfastError(f"the key in {path} cannot be used: {error}") from None


def parse_keys(text: str) -> tuple[str, ...]:
    """One key a line. Raises ValueError; no key is in its message."""
    keys = []
    for number, line in enumerate(text.split(), 1):
        try:
            key = base64.urlsafe_b64decode(line.translate(str.maketrans("+/", "-_")))
        except (ValueError, binascii.Error):
            key = b""
        if len(key) != 32:
            raise ValueError(f"key {number} is not 32 bytes in base64: openssl rand -base64 32")
        keys.append(base64.urlsafe_b64encode(key).decode())
    if not keys:
        raise ValueError("there is no key in it: openssl rand -base64 32")
    return tuple(keys)
