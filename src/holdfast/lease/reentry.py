"""The secrets with which a client re-enters its leases. The database stores only their hashes."""

from __future__ import annotations

from holdfast.runtime.identity import new_token


class ReentrySecrets:
    """Those that were given, by holder, and one of the client's own for every other holder."""

    def __init__(self, _engine: object) -> None:
        self._own, self._given = new_token(), dict[str, str]()

    def remember(self, holder: str, secret: str | None) -> str:
        """The secret for this holder: the one given now, or before, or the client's own."""
        if secret is not None:
            self._given[holder] = secret
        return self._given.get(holder, self._own)


def check_secret(secret: object) -> None:
    """Errors do not quote it."""
    if not isinstance(secret, str):
        raise TypeError(f"reenter must be a str, the secret to re-enter with, not {type(secret).__name__}")
    if not 1 <= len(secret) <= 200 or not secret.isprintable():
        raise ValueError("reenter must have 1 to 200 characters and no control characters")
