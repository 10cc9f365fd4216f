"""Who may import whom: the rooms are in one order, read from the source, and docs/design.md draws it.

`python tests/pure/test_rooms.py` writes the drawing again.
"""

import ast
from functools import cache
from pathlib import Path

import hyperbatch

ROOT = Path(hyperbatch.__file__).parent
PAGE = ROOT.parent / "docs" / "design.md"
NO_TORCH = {
    *(
        "callbacks",
        "choices",
        "cli",
        "config",
        "cores",
        "durable",
        "errors",
        "memory",
        "mllog",
        "plan",
        "preview",
        "recipes",
    ),
    *("record", "report", "schedule", "sim", "sweep", "tables", "trackers", "vocabulary"),
}

# From the bottom up. A room is a folder or a module of the package; it imports from lower rows only.
ROWS = (
    ("choices", "cores", "errors", "memory", "stopwatch", "tables", "vocabulary"),
    ("config", "durable", "kernels"),
    ("models", "recipes", "schedule"),
    ("data", "params"),
    ("tracing",),
    ("plan",),
    ("arena", "checkpoint", "record", "sim"),
    ("callbacks", "comm", "export", "mllog", "report"),
    ("optim", "predict", "trackers"),
    ("engine",),
    ("launch",),
    ("bench", "preview", "sweep"),
    ("cli",),
    ("__init__", "__main__"),
)
HEIGHT = {room: height for height, row in enumerate(ROWS) for room in row}


def imports(path):
    """(module, whether it is loaded with the file) for each import; TYPE_CHECKING blocks and functions load nothing."""
    tree = ast.parse(path.read_text())
    late = set()
    for node in ast.walk(tree):
        is_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if is_checking or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            late |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}: imports are absolute"
            yield node.module, id(node) not in late
            yield from ((f"{node.module}.{alias.name}", id(node) not in late) for alias in node.names)


def files():
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).with_suffix("").parts[0], path


@cache
def graph():
    """Room -> {room it imports: the files that do}; TYPE_CHECKING blocks and functions count, too."""
    found = {room: {} for room, _ in files()}
    for room, path in files():
        for module, _ in imports(path):
            package, _, name = module.partition(".")
            name = name.partition(".")[0]
            if package != "hyperbatch" or name in ("", "__version__", room):
                continue
            # A public name is resolved by the package itself.
            found[room].setdefault(name if name in found else "__init__", set()).add(str(path.relative_to(ROOT)))
    return found


def draw():
    """Each room, from the top, with the rooms it imports; one that it also reaches through another is left out."""
    below = {room: set(to) for room, to in graph().items()}

    @cache
    def reached(room):
        return below[room].union(*(reached(name) for name in below[room]))

    lines = []
    for row in reversed(ROWS[:-1]):
        for room in row:
            direct = {name for name in below[room] if not any(name in reached(other) for other in below[room])}
            lines.append(f"{room:12}{' '.join(sorted(direct))}".rstrip())
    return "\n".join(lines) + "\n"


def drawing_on_the_page():
    """(text before, the drawing, text after)"""
    before, _, rest = PAGE.read_text().partition("```rooms\n")
    drawing, _, after = rest.partition("```\n")
    return before + "```rooms\n", drawing, "```\n" + after


def test_rooms_without_torch_do_not_load_it():
    loaded = {
        f"{path.relative_to(ROOT)}: {module}"
        for room, path in files()
        if room in NO_TORCH
        for module, at_top in imports(path)
        if at_top and module.split(".")[0] in ("torch", "triton")
    }
    assert not loaded


def test_every_room_has_a_place_in_the_order():
    assert set(graph()) == set(HEIGHT), "add the new room to ROWS"


def test_rooms_import_from_lower_rows_only():
    upward = {
        (room, name): sorted(paths)
        for room, to in graph().items()
        for name, paths in to.items()
        if HEIGHT[name] >= HEIGHT[room]
    }
    assert upward == {}


def test_the_design_page_draws_the_rooms_as_they_are():
    assert drawing_on_the_page()[1] == draw(), "run python tests/pure/test_rooms.py"


def test_the_package_does_without_the_tools_beside_it():
    """benchmarks/ is not in the wheel."""
    found = {path.name for _, path in files() for module, _ in imports(path) if module.split(".")[0] == "benchmarks"}
    assert not found


if __name__ == "__main__":
    head, _, tail = drawing_on_the_page()
    PAGE.write_text(head + draw() + tail)
    print(f"{PAGE} written")
