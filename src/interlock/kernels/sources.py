"""Which source files a native function is made from: its module, and every module of ours that this one imports, directly or not."""

import ast
import functools
import importlib.util
from pathlib import Path

_OWN_PACKAGE = __name__.split(".", 1)[0]


@functools.cache
def read_sources(module: str) -> dict[str, bytes]:
    """Sources of `module` and of the modules of its top-level package, and of ours, that it imports, by module name.

    Modules are found, not run: only the packages above them are imported.
    """
    packages = {_OWN_PACKAGE, module.split(".", 1)[0]}
    found: dict[str, bytes] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in found and name.split(".", 1)[0] in packages and (path := _source_path(name)) is not None:
            found[name] = path.read_bytes()
            pending += _imported_names(path)
    return dict(sorted(found.items()))


@functools.cache
def _source_path(name: str) -> Path | None:
    """The file of a module or package, or None if `name` is neither."""
    parent, _, _ = name.rpartition(".")
    if parent and not _is_package(parent):
        return None
    spec = importlib.util.find_spec(name)
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def _is_package(name: str) -> bool:
    path = _source_path(name)
    return path is not None and path.name == "__init__.py"


@functools.cache
def _imported_names(path: Path) -> tuple[str, ...]:
    """What the file imports, as absolute names of things that may be modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return tuple(names)
