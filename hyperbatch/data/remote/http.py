"""Files behind http:// and https://, read by range requests over reused connections."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from urllib.parse import quote, urljoin, urlsplit

from hyperbatch.data.remote.store import Missing, Refused, Stat
from hyperbatch.errors import InputError

_TIMEOUT_S = 30.0
_PIECE_BYTES = 1 << 18
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_KEPT = "%:/?#[]@!$&'()*+,;=~"  # characters that have a meaning in an address, or are part of a quoted character
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)


class HttpStore:
    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._parts = urlsplit(url)
            valid = bool(self._parts.hostname) and (self._parts.port or 1) > 0
        except ValueError:  # the port is not a number, or a bracket is not closed
            valid = False
        if not valid:
            raise InputError(f"{url} is not an address; give https://HOST/PATH")
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}

    def __del__(self) -> None:
        for connections in getattr(self, "_idle", {}).values():
            for connection in connections:
                connection.close()

    def names(self) -> list[str] | None:
        return None  # web servers have no common way to list files

    def stat(self, name: str) -> Stat:
        # A range request and not HEAD, because signed addresses do not allow HEAD.
        with self._asked(name, 0, 1) as response:
            if response.status == 206:
                response.read()
            # The Content-Length of a partial response is not the size of the file.
            told = response.getheader("Content-Range" if response.status in (206, 416) else "Content-Length")
            size = (told or "").rpartition("/")[2]
            if not size.isdigit():
                raise Refused("the server does not report the size of the file")
            return Stat(int(size), _version(response))

    def read(self, name: str, start: int, stop: int, version: str | None = None) -> Iterator[bytes]:
        with self._asked(name, start, stop) as response:
            if response.status == 416:
                raise Refused(f"the file ends before byte {start}")
            if response.status == 200 and start > 0:
                raise Refused("the server does not support range requests; use one that does, such as nginx")
            place = response.getheader("Content-Range") or ""
            if response.status == 206 and not place.startswith(f"bytes {start}-"):
                raise Refused(f"the server sends other bytes than were asked for ({place or 'it does not say which'})")
            if version not in (None, _version(response)):
                raise Refused("the file has changed since it was opened")
            left = stop - start
            while left > 0:
                data = response.read(min(left, _PIECE_BYTES))
                if not data:
                    return
                left -= len(data)
                yield data

    @contextlib.contextmanager
    def _asked(self, name: str, start: int, stop: int) -> Iterator[http.client.HTTPResponse]:
        """Sends a range request and yields the response. If all of it was read, the connection is kept for the next
        request."""
        path = self._parts.path.rstrip("/") + (f"/{quote(name)}" if name else "") or "/"
        url = self._parts._replace(path=path, fragment="").geturl()
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        for _ in range(_MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            host = parts.scheme, parts.netloc
            connection, kept = self._take(*host), False
            try:
                # Quoted, as browsers do it, because copied addresses may contain spaces and umlauts.
                target = quote(parts.path + (f"?{parts.query}" if parts.query else ""), safe=_KEPT)
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
                if response.status in _REDIRECTS:
                    url = urljoin(url, response.getheader("Location") or "")
                    if urlsplit(url).scheme not in ("http", "https"):
                        raise Refused(f"the server redirects to {url!r}")
                    continue
                _check_status(response)
                yield response
                if response.isclosed():
                    self._keep(*host, connection)
                    kept = True
                return
            except (http.client.HTTPException, OSError) as error:
                self._forget(*host)  # the idle connections to this host may be closed, too
                if isinstance(error, OSError):
                    raise
                raise OSError(f"the connection was closed early ({type(error).__name__})") from error
            finally:
                if not kept:
                    connection.close()
        raise Refused("the server redirects too many times")

    def _take(self, scheme: str, netloc: str) -> http.client.HTTPConnection:
        with self._lock:
            idle = self._idle.get((scheme, netloc))
            if idle:
                return idle.pop()
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return kind(netloc.rpartition("@")[2], timeout=_TIMEOUT_S)

    def _keep(self, scheme: str, netloc: str, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.setdefault((scheme, netloc), []).append(connection)

    def _forget(self, scheme: str, netloc: str) -> None:
        with self._lock:
            for connection in self._idle.pop((scheme, netloc), ()):
                connection.close()


def _check_status(response: http.client.HTTPResponse) -> None:
    status = response.status
    said = f"the server answers {status} {response.reason}".rstrip()
    if status in (404, 410):
        raise Missing(said)
    if status in _TEMPORARY:
        raise OSError(said)
    if status not in (200, 206, 416):
        raise Refused(said)


def _version(response: http.client.HTTPResponse) -> str:
    return response.getheader("ETag") or response.getheader("Last-Modified") or ""
