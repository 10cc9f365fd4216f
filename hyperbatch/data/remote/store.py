"""The interface of remote storage, and how readers recover from dropped connections: they continue where they
stopped."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from hyperbatch.errors import InputError

# Seconds to wait before each retry; any progress starts the list again. A wrong address is reported soon, but a running
# job survives a server that is restarted.
OPENING_WAITS_S = (0.2, 1.0, 3.0)
READING_WAITS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 30.0, 30.0)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Where the data are, and how many bytes of them may be cached on this host."""

    url: str
    cache_bytes: int

    def __str__(self) -> str:
        return self.url


class Stat(NamedTuple):
    size_bytes: int
    version: str  # changes when the file changes


class RemoteError(Exception):
    """A remote file cannot be read. The message says why; callers put the address in front of it."""


class Missing(RemoteError):
    """There is no such file."""


class Refused(RemoteError):
    """The request failed, and a retry would not help."""


class Unreachable(RemoteError):
    """The request still failed after all retries."""


class Store(Protocol):
    """Files below an address. The name "" means the address itself. An OSError is worth a retry."""

    url: str

    def stat(self, name: str) -> Stat: ...
    def read(self, name: str, start: int, stop: int, version: str | None = None) -> Iterator[bytes]:
        """Yields bytes [start, stop) in pieces, or fewer if the connection ends. Raises Refused if the version
        differs."""
        ...

    def names(self) -> list[str] | None:
        """Returns the names of all files below the address, or None if they cannot be listed."""
        ...


def is_address(data: object) -> bool:
    return isinstance(data, str) and _SCHEME.match(data) is not None


def open_store(url: str) -> Store:
    """Opens an address. Raises InputError if it is invalid, or needs a package that is not installed."""
    if url.lower().startswith(("http://", "https://")):
        from hyperbatch.data.remote.http import HttpStore

        return HttpStore(url)
    from hyperbatch.data.remote.objects import ObjectStore

    return ObjectStore(url)


def file_name(url: str) -> str:
    """Returns the name that the file at an address gets on disk."""
    return url.partition("?")[0].rstrip("/").rpartition("/")[2]


def file_url(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}" if name else url


def read_range(
    store: Store,
    name: str,
    start: int,
    stop: int,
    *,
    version: str | None = None,
    patient: bool = True,
    stopped: threading.Event | None = None,
) -> Iterator[bytes]:
    """Yields bytes [start, stop) in pieces, and continues after dropped connections."""
    while start < stop:

        def piece(start: int = start) -> tuple[bytes, Iterator[bytes]]:
            pieces = store.read(name, start, stop, version)
            first = next(pieces, b"")
            if not first:
                raise OSError("the connection was closed before the end")
            return first, pieces

        first, rest = persist(piece, patient=patient, stopped=stopped)
        start += len(first)
        yield first
        try:
            for data in rest:
                start += len(data)
                yield data
        except OSError:
            continue  # the next request starts here


def persist(ask: Callable[[], T], *, patient: bool, stopped: threading.Event | None = None) -> T:
    """Returns the result of `ask`, which is tried again after each OSError. Raises Unreachable after the last retry, or
    after an error if `stopped` is set."""
    waits_s = READING_WAITS_S if patient else OPENING_WAITS_S
    for wait_s in (*waits_s, None):
        try:
            return ask()
        except OSError as error:
            if wait_s is None or (stopped is not None and stopped.is_set()):
                tries = len(waits_s) + 1
                raise Unreachable(f"{_said(error)} (tried {tries} times over {sum(waits_s):.0f} s)") from error
            (stopped or threading.Event()).wait(wait_s)
    raise AssertionError


def _said(error: OSError) -> str:
    return " ".join(str(error.strerror or error).split()) or type(error).__name__


def not_readable(url: str, error: RemoteError) -> InputError:
    """Returns the error for the user when a set cannot be opened."""
    hint = {Missing: "check the address", Refused: "check the address and your permission to read it"}.get(
        type(error), "check the address and the network"
    )
    return InputError(f"{url} cannot be read: {error}; {hint}")
