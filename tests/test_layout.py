"""The tree is what it says it is: the wheel, the shelves, and who may import whom."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import mmspec
from mmspec import compressors, verifiers

ROOT = Path(__file__).resolve().parents[1]
SHELVES = ("modalities", "compressors", "verifiers")
ENTRIES = ("pyproject.toml", "mmspec", *SHELVES, "plugins", "demos", "tests", "README.md")
ENGINE = ("draft", "trees", "distributions", "targets", "codes", "decode", "stats")
LONGEST = 400  # lines of a file that is still one idea


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the tree, built by the build backend itself: no network, no pip."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("mmspec", *SHELVES):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def files(folder: Path, pattern: str = "*") -> Iterator[Path]:
    """Files below a folder, relative to it. Links to folders (mmspec/verifiers) stay out."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and path.name != "__pycache__":
            yield from (path.relative_to(folder) / below for below in files(path, pattern))
        elif path.is_file() and path.match(pattern):
            yield path.relative_to(folder)


def sources() -> list[Path]:
    """Every Python file that is not a test, relative to the root."""
    folders = ("mmspec", *SHELVES, "plugins", "demos")
    return [Path(name) / path for name in folders for path in files(ROOT / name, "*.py")]


def imports(source: Path, typing: bool = True) -> set[str]:
    """Every module that a file names in an import, wherever it stands, but for `typing` alone."""
    found: set[str] = set()
    tree = ast.parse((ROOT / source).read_text())
    if not typing:
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno} is a relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tree = {(Path("mmspec") / path).as_posix() for path in files(ROOT / "mmspec")}
    for shelf in SHELVES:
        tree |= {(Path("mmspec") / shelf / path).as_posix() for path in files(ROOT / shelf)}
    missing, extra = sorted(tree - shipped), sorted(shipped - tree)
    assert not missing, "not in the wheel; add the folder to packages, or its kind to package-data"
    assert not extra


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert f"\nVersion: {mmspec.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_packages_are_the_folders_with_code(project: dict[str, Any]) -> None:
    tree = {Path("mmspec") / path.parent for path in files(ROOT / "mmspec", "*.py")}
    for shelf in SHELVES:
        tree |= {Path("mmspec") / shelf / path.parent for path in files(ROOT / shelf, "*.py")}
    expected = {".".join(folder.parts) for folder in tree}
    listed = set(project["tool"]["setuptools"]["packages"])
    assert listed == expected, "folders of code and `packages` in pyproject.toml differ"
    for name in expected:
        assert (ROOT / Path(*name.split(".")) / "__init__.py").is_file(), name


@pytest.mark.parametrize("entry", ENTRIES)
def test_root_entries_exist(entry: str) -> None:
    assert (ROOT / entry).exists()
    assert not (ROOT / entry).is_symlink()


@pytest.mark.parametrize("shelf", SHELVES)
def test_shelves_are_packages_behind_a_link(shelf: str) -> None:
    assert (ROOT / shelf / "__init__.py").is_file()
    link = ROOT / "mmspec" / shelf
    if (ROOT / ".git").exists():  # an unpacked source distribution has no links
        assert link.is_symlink()
        assert link.readlink() == Path("..") / shelf
        assert link.resolve() == ROOT / shelf


@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_does_not_import_shelves(name: str) -> None:
    shelves = tuple(f"mmspec.{shelf}" for shelf in SHELVES)
    place = Path("mmspec") / name
    folder = files(ROOT / place, "*.py") if (ROOT / place).is_dir() else ()
    for path in [place / one for one in folder] or [place.with_suffix(".py")]:
        assert not [module for module in imports(path) if in_any(module, shelves)], path


@pytest.mark.parametrize(
    ("shelf", "others"),
    [
        ("compressors", ("mmspec.verifiers", "mmspec.modalities")),
        ("verifiers", ("mmspec.compressors", "mmspec.modalities")),
    ],
)
def test_shelves_do_not_import_each_other(shelf: str, others: tuple[str, ...]) -> None:
    for path in files(ROOT / shelf, "*.py"):
        bad = [module for module in imports(Path(shelf) / path) if in_any(module, others)]
        assert not bad, path


@pytest.mark.parametrize(
    ("folder", "above"),
    [
        ("drafters", ("recipes", "verifiers", "training", "modalities")),
        ("recipes", ("modalities",)),
        ("training", ("recipes", "modalities")),
        ("targets", ("drafters", "recipe", "recipes", "models", "codes")),
        ("models", ("drafters", "recipe", "recipes", "codes")),
    ],
)
def test_arrows_run_one_way(folder: str, above: tuple[str, ...]) -> None:
    packages = tuple(f"mmspec.{name}" for name in above)
    for path in files(ROOT / "mmspec" / folder, "*.py"):
        source = Path("mmspec") / folder / path
        bad = [module for module in imports(source, typing=False) if in_any(module, packages)]
        assert not bad, path


def test_recipes_are_described_without_drafters() -> None:
    known = imports(Path("mmspec/recipe.py"))
    assert not [module for module in known if in_any(module, ("mmspec.drafters",))]


def test_every_name_of_a_shelf_leads_to_a_class_of_it() -> None:
    for name in compressors.COMPRESSORS:
        file = name.replace("-", "_")
        compressor = compressors.parse_compressor(name)
        assert type(compressor).__module__ == f"{compressors.__name__}.{file}"
    for name in verifiers.names():
        file = verifiers.FILES.get(name, name.replace("-", "_"))
        made = verifiers.parse_verifier(name)
        homes = {type(one).__module__ for one in (made, made.rule)}
        assert f"{verifiers.__name__}.{file}" in homes, name


def in_any(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_imports_are_absolute_and_inside_the_package() -> None:
    foreign = (*SHELVES, "tests", "demos")
    like = re.compile(rf"^\s*(?:from|import)\s+(?:\.|(?:{'|'.join(foreign)})\b)", re.MULTILINE)
    for source in sources():
        if like.search((ROOT / source).read_text()):  # reading all trees takes longer
            roots = {module.partition(".")[0] for module in imports(source)}
            assert not roots & {*foreign}, source


def test_files_are_one_idea() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in sources()}
    assert not {path: lines for path, lines in lengths.items() if lines > LONGEST}


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, mmspec; assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", mmspec.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(mmspec, name) is not None
    assert name in dir(mmspec)


def test_the_guide_explains_every_statistic() -> None:
    guide = (ROOT / "docs" / "reference" / "statistics.md").read_text()
    unexplained = [f.name for f in fields(mmspec.Stats) if f"`{f.name}`" not in guide]
    assert not unexplained


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'acelerate'"):
        _ = mmspec.acelerate  # type: ignore[attr-defined]
