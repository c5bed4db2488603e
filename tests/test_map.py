"""Every source file is tested at its mirrored path or by a row of docs/reference/tests.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "reference" / "tests.md").read_text(encoding="utf-8")
SHELVES = ("modalities", "compressors", "verifiers")
MODALITY = "mmspec.modalities."
# Packages that load the files of their folder by name; `accelerate` loads those of modalities.
REGISTRIES = ("mmspec.recipes", "mmspec.formats", "mmspec.compressors", "mmspec.verifiers")
FRONT_DOORS = ("mmspec", "mmspec.cli", "mmspec.zoo", "mmspec.registry")

_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import (\([^)]*\)|.+)|import ([\w.]+))", re.MULTILINE)
_DOTTED = re.compile(r"\"((?:mmspec|tools)(?:\.\w+)+)")


@dataclass(frozen=True)
class Row:
    """One row of the table: patterns of source files, and the tests that cover them."""

    patterns: tuple[str, ...]
    tests: tuple[str, ...]

    def matches(self, source: str) -> bool:
        return any(is_match(source, pattern) for pattern in self.patterns)


def is_match(source: str, pattern: str) -> bool:
    """Whether a path fits a pattern: `*` stands for a part of one name, `**` for whole folders."""
    wild = {"**": ".*", "*": "[^/]*"}
    parts = (wild.get(part) or re.escape(part) for part in re.split(r"(\*\*?)", pattern))
    return re.fullmatch("".join(parts), source) is not None


def read_rows() -> list[Row]:
    section = GUIDE.partition("\n## Where the tests are\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \| (`.*?) \|$", section, re.MULTILINE)
    return [
        Row(
            tuple(re.findall("`([^`]+)`", sources)),
            tuple(f"tests/{name}" for name in re.findall("`([^`]+)`", tests)),
        )
        for sources, tests in cells
    ]


def list_sources() -> list[str]:
    """Paths of all source files, without packages that hold only a docstring."""
    found = []
    for folder in ("mmspec", *SHELVES, "plugins", "tools", "demos"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            is_link = name.startswith(tuple(f"mmspec/{shelf}/" for shelf in SHELVES))
            if not is_link and (path.name != "__init__.py" or _has_code(path)):
                found.append(name)
    return found


def _has_code(path: Path) -> bool:
    return any(not isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body)


def mirrored_path(source: str) -> str:
    """`mmspec/a/b.py` -> `tests/a/test_b.py`; other folders keep their name."""
    folder, _, name = source.removeprefix("mmspec/").rpartition("/")
    return "/".join(part for part in ("tests", folder, f"test_{name.lstrip('_')}") if part)


ROWS = read_rows()
SOURCES = list_sources()
MODULES = {
    ("mmspec." if name.startswith(SHELVES) else "")
    + name.removeprefix("plugins/vllm/")
    .removesuffix(".py")
    .removesuffix("/__init__")
    .replace("/", "."): name
    for name in SOURCES
}
UNMIRRORED = [name for name in SOURCES if not (ROOT / mirrored_path(name)).exists()]


@cache
def read_imports(path: str) -> frozenset[str]:
    """Dotted names that a file imports, anywhere in it, or gives as strings."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = set(_DOTTED.findall(text))
    for home, names, module in _IMPORT.findall(text):
        found.add(home or module)
        found |= {f"{home}.{name}" for name in re.findall(r"\w+", names)}
    return frozenset(found)


@cache
def direct_imports(test: str) -> frozenset[str]:
    """Dotted names that a test imports, itself or through the helpers of the tests."""
    found, todo = set[str](), [test]
    done = set(todo)
    while todo:
        names = read_imports(todo.pop())
        found |= names
        helpers = {f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")}
        packages = {name.replace(".py", "/__init__.py") for name in helpers}
        new = {one for one in (helpers | packages) - done if (ROOT / one).is_file()}
        done |= new
        todo += new
    return frozenset(found)


def reach(names: Iterable[str]) -> set[str]:
    """The source files behind dotted names, with all that they import or load by name."""
    todo = [name for name in names if name in MODULES]
    found = set(todo)
    while todo:
        new = (set(_loaded_by(todo.pop())) & MODULES.keys()) - found
        found |= new
        todo += new
    return {MODULES[name] for name in found}


def _loaded_by(module: str) -> Iterator[str]:
    yield from read_imports(MODULES[module])
    yield f"{module}.__main__"
    if module in REGISTRIES:
        yield from (name for name in MODULES if name.startswith(f"{module}."))
    if module == "mmspec.registry":
        yield from (name for name in MODULES if name.startswith(MODALITY))
    if module == "mmspec.zoo.training":
        yield from (name for name in MODULES if name.startswith("tools.zoo."))


def test_every_source_has_its_test_or_a_row() -> None:
    missing = [name for name in UNMIRRORED if not any(row.matches(name) for row in ROWS)]
    assert not missing, f"add tests at the mirrored path, or a row: {missing}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.patterns[0])
def test_a_row_is_in_use(row: Row) -> None:
    """Every pattern matches a file that has no test of its mirrored path."""
    for pattern in row.patterns:
        assert any(is_match(name, pattern) for name in UNMIRRORED), f"{pattern} matches nothing"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.patterns[0])
def test_tests_of_a_row_exercise_its_files(row: Row) -> None:
    """Each test imports a file of the row or what loads it by name; together they reach all."""
    files = {name for name in UNMIRRORED if row.matches(name)}
    modules = {module for module, name in MODULES.items() if name in files}
    doors = {name for name in REGISTRIES if any(one.startswith(f"{name}.") for one in modules)}
    if any(one.startswith((MODALITY, "mmspec.cli.", "mmspec.targets.")) for one in modules):
        doors |= set(FRONT_DOORS)
    for test in row.tests:
        assert (ROOT / test).is_file(), f"{test} does not exist"
        names = direct_imports(test)
        packages = {name.rpartition(".")[0] for name in names} - {"mmspec"}
        assert (names | packages) & (modules | doors), f"{test} imports nothing of the row"
    rest = files - reach(name for test in row.tests for name in direct_imports(test))
    assert not rest, f"the tests of the row do not reach {sorted(rest)}"


def test_the_table_is_short() -> None:
    assert 0 < len(ROWS) <= 45
