"""Who may import whom: the design's rules, read from the source."""

import ast
from pathlib import Path

import hyperbatch

ROOT = Path(hyperbatch.__file__).parent
NO_TORCH = {"config", "errors", "recipes", "schedule", "plan", "sim", "record", "mllog", "report", "preview", "cli"}
# room -> rooms it must not reach, at any depth of the code
FORBIDDEN = {
    "config": {"recipes", "plan", "sim", "data", "models", "arena", "optim", "comm", "engine", "report", "bench"},
    "recipes": {"plan", "sim", "data", "models", "arena", "optim", "comm", "engine", "report", "bench"},
    "schedule": {"recipes", "plan", "sim", "data", "models", "arena", "optim", "comm", "engine", "report", "bench"},
    "plan": {"sim.sweep", "data", "models", "arena", "optim", "comm", "engine", "report", "bench"},
    "sim": {"data", "models", "arena", "optim", "comm", "engine", "report", "bench"},
    "record": {"data", "models", "arena", "optim", "comm", "engine", "report", "bench"},
    "report": {"data", "models", "arena", "optim", "comm", "engine", "bench"},
    "data": {"models", "arena", "optim", "comm", "engine", "report", "bench"},
    "models": {"data", "arena", "optim", "comm", "engine", "report", "bench"},
    "kernels": {"data", "models", "comm", "engine", "report", "bench"},
    "arena": {"data", "models", "comm", "engine", "report", "bench"},
    "optim": {"data", "models", "engine", "report", "bench"},
    "comm": {"data", "models", "engine", "report", "bench"},
    "engine": {"report", "bench"},
}


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
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) not in late
            yield from ((f"{node.module}.{alias.name}", id(node) not in late) for alias in node.names)


def files():
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).with_suffix("").parts[0], path


def test_rooms_without_torch_do_not_load_it():
    loaded = {
        f"{path.relative_to(ROOT)}: {module}"
        for room, path in files()
        if room in NO_TORCH
        for module, at_top in imports(path)
        if at_top and module.split(".")[0] in ("torch", "triton")
    }
    assert not loaded


def test_no_room_reaches_where_it_must_not():
    breaches = {
        f"{path.relative_to(ROOT)} imports {module}"
        for room, path in files()
        for module, _ in imports(path)
        if module.startswith("hyperbatch.")
        and any(
            module.removeprefix("hyperbatch.") == name or module.removeprefix("hyperbatch.").startswith(f"{name}.")
            for name in FORBIDDEN.get(room, ())
        )
    }
    assert not breaches


def test_the_package_does_without_the_tools_beside_it():
    """benchmarks/ is not in the wheel; and any room may use the stopwatch, so it uses none."""
    found = {(path.name, module) for _, path in files() for module, _ in imports(path)}
    assert not {name for name, module in found if module.split(".")[0] == "benchmarks"}
    assert not {module for name, module in found if name == "stopwatch.py" and module.startswith("hyperbatch")}
