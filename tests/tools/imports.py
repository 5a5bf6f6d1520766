"""Circles and back arrows among the files of a package, from their text alone.

    python tests/tools/imports.py opacus                              # circles
    python tests/tools/imports.py opacus/core --parts platform kernels rules,privacy record

An import counts wherever it stands: under ``TYPE_CHECKING`` and inside functions, too. Parts are
folders or files of the package, from the ground up; those joined by a comma stand beside each
other and may not import each other. A *back arrow* is an import from a part that is not below.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

Graph = Mapping[str, set[str]]  # module -> the modules that it imports


def modules_of(package: Path) -> dict[str, Path]:
    """The files of a package by the name that they are imported by.

    A folder that lies in folders with an ``__init__.py`` is named as their part.
    """
    top = package.resolve()
    while (top.parent / "__init__.py").exists():
        top = top.parent
    found = {}
    for path in sorted(package.resolve().rglob("*.py")):
        names = path.relative_to(top.parent).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports_in(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """What a file imports: ``("a.b", "c")`` of ``from a.b import c``, ``("a.b", "")`` of a module."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from ((base, alias.name) for alias in node.names)


def graph_of(package: Path) -> dict[str, set[str]]:
    """Which modules of a package import which others of it."""
    modules = modules_of(package)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = set()
        for base, name in imports_in(path, module):
            inner = f"{base}.{name}" if name else base
            found.add(inner if inner in modules else base)
        graph[module] = (found & modules.keys()) - {module}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Sets of modules that all reach each other, the largest first (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        open_.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in open_:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            start = open_.index(module)
            circle, open_[start:] = sorted(open_[start:]), []
            if len(circle) > 1:
                found.append(circle)

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return sorted(found, key=len, reverse=True)


def part_of(module: str, root: str) -> str:
    """First name below ``root``: ``"rules"`` for ``opacus.core.rules.base``, else ``""``."""
    return module.removeprefix(root).lstrip(".").split(".")[0]


def back_arrows(graph: Graph, root: str, parts: Sequence[str]) -> list[tuple[str, str]]:
    """Imports from a part that is not below, as ``(module, imported)``.

    Args:
        graph: Of the package ``root``.
        root: Its name, ``"opacus.core"``.
        parts: Names below it, from the ground up; ``"rules,privacy"`` stand beside each other.
            The package itself, ``__init__.py``, may import all of them.

    Raises:
        ValueError: A module is in none of the parts.
    """
    floor = {name: i for i, level in enumerate(parts) for name in level.split(",")}
    unknown = sorted({part_of(m, root) for m in graph} - floor.keys() - {""})
    if unknown:
        raise ValueError(f"{root} has {unknown}, which are in none of the parts {list(parts)}")
    top = len(parts)
    arrows = []
    for module, imported in sorted(graph.items()):
        part = part_of(module, root)
        for other in sorted(imported):
            below = floor.get(part_of(other, root), top) < floor.get(part, top)
            if part_of(other, root) != part and not below:
                arrows.append((module, other))
    return arrows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path, help="folder of the package")
    parser.add_argument("--parts", nargs="+", default=[], help="its parts, from the ground up")
    arguments = parser.parse_args()
    graph = graph_of(arguments.package)
    found = circles(graph)
    print(f"{len(graph)} modules, {sum(map(len, graph.values()))} imports, {len(found)} circles")
    for circle in found:
        print(f"  {len(circle)}: {', '.join(circle)}")
    if arguments.parts:
        root = min(graph, key=len)
        arrows = back_arrows(graph, root, arguments.parts)
        print(f"{len(arrows)} back arrows")
        for module, other in arrows:
            print(f"  {module} -> {other}")


if __name__ == "__main__":
    main()
