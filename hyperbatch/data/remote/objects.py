"""Files in object stores and everything else that fsspec supports: s3://, gs://, az://, hf://, ..."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hyperbatch.data.remote.store import Missing, Refused, Stat
from hyperbatch.errors import InputError

_PIECE_BYTES = 8 << 20

T = TypeVar("T")


class ObjectStore:
    def __init__(self, url: str) -> None:
        self.url = url
        try:
            fsspec: Any = importlib.import_module("fsspec.core")
        except ImportError as error:
            raise InputError(f"{url}: needs fsspec; run pip install 'hyperbatch[remote]'") from error
        try:
            self._files, self._root = fsspec.url_to_fs(url.rstrip("/"))
        except ImportError as error:  # the text of the error says which package is missing
            raise InputError(f"{url}: {error}; s3:// and gs:// come with pip install 'hyperbatch[remote]'") from error
        except Exception as error:  # an unknown scheme, or options that the scheme's package rejects
            raise InputError(f"{url} cannot be opened: {' '.join(str(error).split())}") from error

    def stat(self, name: str) -> Stat:
        path = self._path(name)
        found = _asked(lambda: self._files.info(path))
        if found.get("type") == "directory":
            raise Missing("it is a folder")
        if found.get("size") is None:
            raise Refused("the store does not report the size of the file")
        return Stat(int(found["size"]), str(_asked(lambda: self._files.ukey(path))))

    def read(self, name: str, start: int, stop: int, version: str | None = None) -> Iterator[bytes]:
        path = self._path(name)
        if version is not None and self.stat(name).version != version:
            raise Refused("the file has changed since it was opened")
        while start < stop:
            end = min(stop, start + _PIECE_BYTES)
            data = _asked(lambda start=start, end=end: self._files.cat_file(path, start=start, end=end))
            if not data:
                return
            yield data
            start += len(data)

    def names(self) -> list[str] | None:
        found = _asked(lambda: self._files.find(self._root))
        return [path[len(self._root) :].lstrip("/") for path in found]

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def _asked(ask: Callable[[], T]) -> T:
    """Calls `ask` and converts its errors, which are different for every scheme's package. Those that become Missing or
    Refused are final. All others become OSError and are worth a retry."""
    try:
        return ask()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise Missing("there is no such file") from error
    except PermissionError as error:
        raise Refused(f"permission denied ({' '.join(str(error).split())})") from error
    except (NotImplementedError, TypeError) as error:
        raise Refused(" ".join(str(error).split()) or type(error).__name__) from error
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
