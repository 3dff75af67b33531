"""The map of the house: who imports whom, no circles, and every file in the map of docs/design.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGE = "sglang_unified_kv"
SOURCE = REPO / "python" / PACKAGE

BASE = {"config", "hooking", "launches", "metrics", "names"}
"""Imported by anybody; what they import themselves is below."""
ALLOWED = {
    "names": set(),
    "hooking": set(),
    "config": {"names"},
    "launches": {"config"},
    "metrics": set(),
    "attestation": {"hooking", "metrics"},
    "engage": {"config", "metrics"},
    "kernels": set(),
    "ring": set(),
    "hisparse": {"config", "engage", "kernels"},
    "checkpoint": {"kernels"},
    "placement": {"checkpoint"},
    "edits": {"attestation", "checkpoint", "engage", "hisparse", "ring"} | BASE,
    "plan": {"checkpoint", "config", "edits", "engage", "hisparse", "ring"},
    "plugin": {"edits"} | BASE,
    "reference": {"hooking", "launches"},
    "cli": {"attestation", "edits", "engage", "hisparse", "plan", "plugin", "reference"} | BASE,
    "nightly": {"cli", "plan", "reference"} | BASE,
}
"""Room -> rooms that it may import."""
WITHOUT_SGLANG = {"checkpoint", "placement", "ring", "hisparse", "kernels", "engage"} | BASE - {
    "hooking"
}
"""Rooms that import nothing of SGLang."""


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCE.rglob("*.py")}


def imports(module: str, path: Path) -> set[str]:
    """What a module imports, in functions too, but not for types alone; ours by module, others by name."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else source for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found - {module}


IMPORTS = {module: imports(module, path) for module, path in MODULES.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_a_room_imports_those_that_it_may():
    found = defaultdict(set)
    for module, imported in IMPORTS.items():
        for other in imported & MODULES.keys():
            if room_of(module) and room_of(module) != room_of(other):
                found[room_of(module)].add(room_of(other))
    assert found.keys() <= ALLOWED.keys() == {room_of(m) for m in MODULES} - {""}
    for room, others in ALLOWED.items():
        assert found[room] <= others, (room, found[room] - others)
        assert others - BASE <= found[room], (
            f"{room} no longer imports {others - BASE - found[room]}"
        )


def test_nothing_is_imported_in_a_circle():
    graph = {module: imported & MODULES.keys() for module, imported in IMPORTS.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_rooms_of_pure_python_import_no_sglang():
    for module, imported in IMPORTS.items():
        if room_of(module) in WITHOUT_SGLANG:
            assert not [name for name in imported if name.split(".")[0] == "sglang"], module


def test_the_map_lists_every_file():
    page = (REPO / "docs" / "design.md").read_text()
    table = page.partition("\n| module | one line |\n")[2].partition("\n\n")[0]
    listed = set()
    for row in table.splitlines()[1:]:
        names = re.findall(r"`([\w/]+)`", row.split("|")[1])
        folder = names[0].rpartition("/")[0]
        # The first name has the folder, those after it are in the same.
        listed |= {names[0], *(name if "/" in name else f"{folder}/{name}" for name in names[1:])}
    files = {str(path.relative_to(SOURCE).with_suffix("")) for path in MODULES.values()}
    files = {name for name in files if not name.endswith("__init__")}
    whole = ("reference/", "cli/", "nightly/", "placement/")
    missing = {name for name in files if not name.startswith(whole)} - listed
    assert missing == set()
    assert {name for name in listed if not name.endswith("/")} - files == set()
