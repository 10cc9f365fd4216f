"""The exceptions that are reported to the user in one line, checks of arguments, and the lookup of names."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any


class InputError(ValueError):
    """Invalid input. The message says in one line what is wrong, where, and what to do. The command prints it and exits
    with code 2."""

    on_all_ranks = False  # whether every rank knows it, so that rank 0 prints it for all
    on_host = True  # whether the other ranks of this host know it, so that the first of them prints it


class Damaged(InputError):
    """The bytes of a file are not those that were written. Reading it again would not help."""


class RunFailed(RuntimeError):
    """A run that cannot continue. The message says in one line why, where, and what to try. The command prints it and
    exits with code 1."""

    on_all_ranks, on_host = False, False  # as of InputError
    words: Mapping[str, Any] = MappingProxyType({})  # describe the first failure, if it is known (engine/ending.py)


class Diverged(RunFailed):
    """The loss or the weights have values from which training cannot continue; it can continue from a checkpoint.
    Raised on every rank at the same point."""


class Interrupted(RunFailed):
    """The run was ended by Ctrl-C or SIGTERM."""


class Preempted(Interrupted):
    """The run was preempted and can be continued with --resume. The command exits with code 75 (EX_TEMPFAIL)."""


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Returns the notes that were added to the error with `add_note`."""
    return tuple(getattr(error, "__notes__", ()))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's type if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: Any, known: list[str] | tuple[str, ...], *, listed_by: str | None = None) -> str:
    """Returns `; did you mean 'x'?` for a misspelt name, or the list of known names if none is similar.

    listed_by: the call that lists the names, if they are too many for a line.
    """
    import difflib

    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return (
        f"; known: {', '.join(sorted(known))}" if listed_by is None else f"; {listed_by} lists the {len(known):,} known"
    )


def shown(value: Any) -> str:
    """Returns an argument as an error message shows it: its value if that is short, otherwise its type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a value of type {type(value).__name__}"


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], advice: str) -> None:
    """Raises InputError for an argument of another type. advice: what to give, e.g. `give a GroupPlan of
    plan_groups`."""
    if not isinstance(value, kind):
        raise InputError(f"{name} is {shown(value)}; {advice}")


def check_number(name: str, value: Any, holds: Callable[[float], bool], wanted: str) -> None:
    """Raises InputError unless an argument is a number for which `holds` is true. wanted: describes such a number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not holds(float(value)):
        raise InputError(f"{name} is {shown(value)}; give {wanted}")


def check_whole(name: str, value: Any, *, least: int = 1) -> None:
    """Raises InputError unless an argument is a whole number of at least `least`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {shown(value)}; give a whole number of at least {least}")


@contextlib.contextmanager
def own_code(what: str, rule: str, passes: Callable[[BaseException], bool] = lambda error: False) -> Iterator[None]:
    """A context for the user's own code. It turns an error into a one-line InputError with the location in that code
    and the rule that the code must follow. SystemExit is treated in the same way, because it would look like the
    regular end of a run. passes: returns whether an error does not come from that code; it is then raised unchanged."""
    try:
        yield
    except (InputError, RunFailed):
        raise
    except (Exception, SystemExit) as error:
        if passes(error):
            raise
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        # Frames of hyperbatch, and of libraries that the user's code calls
        others = (f"{Path(__file__).parent}/", "/site-packages/", f"{Path(traceback.__file__).parent}/", "<frozen")
        frame = next((f for f in reversed(frames) if not any(part in f.filename for part in others)), frames[-1])
        place, message = f"in {frame.name}, {frame.filename}:{frame.lineno}", str(error).partition("\n")[0]
        raise InputError(f"{what} raised {type(error).__name__}: {message} ({place}); {rule}") from error


def load_object(path: str, what: str) -> Any:
    """Imports the object named `package.module:name`. The current folder is searched first, as by python -m."""
    import importlib
    import sys

    module_name, _, name = path.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise InputError(f"{what} {path!r}: give package.module:callable")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with own_code(f"{what} {path!r}", "its module must be importable"):
        try:
            return getattr(importlib.import_module(module_name), name)
        except ModuleNotFoundError as error:
            raise InputError(
                f"{what} {path!r}: {error}; give package.module:callable, found from this folder or in PYTHONPATH"
            ) from error
        except SyntaxError as error:  # its message contains the location
            raise InputError(f"{what} {path!r} cannot be imported: {error}; repair it") from error
        except (ImportError, AttributeError) as error:
            raise InputError(f"{what} {path!r}: {error}; give package.module:callable") from error
