"""How large the classes of a package are: methods, attributes, and writes to others' attributes.

    python tests/tools/classes.py opacus --most 12

From the text alone. Methods are those that a class defines itself, special ones such as
``__getstate__`` but ``__init__`` left out; setters count with their properties. Attributes are
those that its methods assign to ``self``.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.tools.imports import modules_of


@dataclass(frozen=True)
class ClassSize:
    """What a class defines itself.

    Attributes:
        name: With the module's.
        methods: Names.
        attributes: Names of what its methods assign to ``self``.
        writes: Attributes of others that its methods assign: ``"self.planner.blocks"``.
    """

    name: str
    methods: frozenset[str]
    attributes: frozenset[str]
    writes: frozenset[str]


def sizes(package: Path) -> list[ClassSize]:
    """All classes of a package."""
    return [
        _size(f"{module}.{node.name}", node)
        for module, path in modules_of(package).items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def too_large(
    classes: Iterable[ClassSize], *, most: int, forced: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """Classes with more methods of their own than ``most``, by name.

    Args:
        classes: To look at.
        most: Number of methods.
        forced: Methods by class that do not count, for an interface demands them.
    """
    own = {c.name: sorted(c.methods - set(forced.get(c.name, ()))) for c in classes}
    return {name: methods for name, methods in own.items() if len(methods) > most}


def _size(name: str, node: ast.ClassDef) -> ClassSize:
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = {f.name for f in functions}
    special = {m for m in methods if m.startswith("__") and m.endswith("__") and m != "__init__"}
    targets = {t for f in functions for t in _targets(f)}
    own = {t.removeprefix("self.") for t in targets if t.count(".") == 1 and t[:5] == "self."}
    others = {t for t in targets if t.count(".") > 1 and t[:5] == "self."}
    return ClassSize(name, frozenset(methods - special), frozenset(own), frozenset(others))


def _targets(function: ast.AST) -> Iterator[str]:
    """Attributes that a function assigns, as they are written."""
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    yield ast.unparse(part)


def main() -> None:
    """Print the largest classes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path, help="folder of the package")
    parser.add_argument("--most", type=int, default=12)
    arguments = parser.parse_args()
    for c in sorted(sizes(arguments.package), key=lambda c: -len(c.methods)):
        if len(c.methods) > arguments.most or len(c.attributes) > 8:
            print(f"{len(c.methods):3} methods, {len(c.attributes):2} attributes  {c.name}")
            if c.writes:
                print(f"      writes {', '.join(sorted(c.writes))}")


if __name__ == "__main__":
    main()
