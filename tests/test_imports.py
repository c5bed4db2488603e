"""Who imports whom: one direction, no circles, nothing late, no modality named outside its room.

The map, from below. A module may import what stands below it, and its own folder; the plugs of
modalities are found by name when they are needed, so nothing imports them at all.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from mmspec import registry

ROOT = Path(__file__).resolve().parents[1]
SHELVES = ("modalities", "compressors", "verifiers")
FLOORS = (
    ("errors", "naming"),
    ("trees", "clock", "declared", "_lazy", "_hf"),
    ("laws",),
    ("draft", "stats"),
    ("targets",),
    ("models",),
    ("codes", "formats"),
    ("compressors",),
    ("recipe",),
    ("drafters", "verifiers"),
    ("training",),
    ("recipes",),
    ("decode", "modality", "registry"),
    ("zoo",),
    ("draft_models",),
    ("modalities",),  # what binds a model to a recipe
    ("streaming", "saving", "api", "__init__"),
    ("bench", "edge"),
    ("making and measuring",),  # modalities/<name>/zoo and measures: how it is trained and judged
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(FLOORS) for room in rooms}
MEASURING = (
    *("zoo", "asking", "examining", "examining_tokens", "files", "sheets", "steps_map", "scenes"),
    *("animation", "judging", "listening", "teaching", "verdict", "video_rag"),
    *("measures", "toys", "baselines", "certificates", "mixture", "sample_tests", "row_costs"),
    *("picture_distance", "likelihood", "survey", "tiny_configs", "tiny_requests"),
)
MODALITIES = [path.name for path in (ROOT / "modalities").iterdir() if [*path.rglob("plug.py")]]
ENTRY = ("mmspec.cli", "mmspec.cli.app", "mmspec.cli.__main__", "mmspec")  # may import late


@dataclass(frozen=True)
class Import:
    """One module of ours imported by another; `is_late` = inside a function."""

    source: str
    target: str
    line: int
    is_late: bool


@lru_cache(maxsize=1)
def modules() -> dict[str, Path]:
    """Every module of ours by its name."""
    found = {}
    for folder in ("mmspec", *SHELVES):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "mmspec" and parts[1] in SHELVES:
                continue  # behind the link of a shelf
            parts = parts if folder == "mmspec" else ("mmspec", *parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@lru_cache(maxsize=1)
def imports() -> tuple[Import, ...]:
    """All imports that happen when the program runs; those for type checkers alone do not."""
    return tuple(one for name in modules() for one in _imports(name))


def _imports(name: str) -> Iterator[Import]:
    tree = ast.parse(modules()[name].read_text())
    typing = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for part in block.body
        for node in ast.walk(part)
    }
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if id(node) in typing or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for target in _targets(node):
            if target in modules() and target != name:
                yield Import(name, target, node.lineno, id(node) not in top)


def _targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    full = [f"{module}.{alias.name}" for alias in node.names]
    return [one if one in modules() else module for one in full]


def room(name: str) -> str:
    """Where a module stands on the map."""
    parts = name.split(".")
    if len(parts) == 1:
        return "__init__"
    if parts[1] == "modalities" and not set(MEASURING).isdisjoint(parts[2:]):
        return "making and measuring"
    return parts[1]


def test_every_module_has_its_place_on_the_map() -> None:
    assert {room(name) for name in modules()} <= set(RANK)


def test_arrows_run_one_way() -> None:
    wrong = [
        f"{one.source}:{one.line} imports {one.target}"
        for one in imports()
        if RANK[room(one.source)] < RANK[room(one.target)]
        or (RANK[room(one.source)] == RANK[room(one.target)] and not _at_home(one))
    ]
    assert not wrong


def _at_home(one: Import) -> bool:
    """Whether source and target share a folder; files without one may know each other."""
    folders = {"drafters", "verifiers"}
    rooms = {room(one.source), room(one.target)}
    return len(rooms) == 1 or not rooms & folders


def test_no_circle_between_modules() -> None:
    arrows: dict[str, set[str]] = {name: set() for name in modules()}
    for one in imports():
        arrows[one.source].add(one.target)
    left = dict(arrows)
    while left:
        free = [name for name, targets in left.items() if not targets & left.keys()]
        assert free, f"circles among {sorted(left)}"
        for name in free:
            del left[name]


def test_nothing_is_imported_late() -> None:
    late = [f"{one.source}:{one.line} {one.target}" for one in imports() if one.is_late]
    assert not [line for line in late if line.split(":")[0] not in ENTRY]


def test_modalities_do_not_import_each_other() -> None:
    for one in imports():
        owner, other = (_owner(name) for name in (one.source, one.target))
        assert owner in (None, other) or other is None, f"{one.source}:{one.line} {one.target}"


def test_nobody_outside_names_a_modality() -> None:
    wrong = [
        f"{one.source}:{one.line} imports {one.target}"
        for one in imports()
        if _owner(one.target) is not None and _owner(one.source) is None
    ]
    assert not wrong


def _owner(name: str) -> str | None:
    """The modality whose room a module is in."""
    parts = name.split(".")
    inside = parts[1:2] == ["modalities"] and len(parts) > 2
    return parts[2] if inside and parts[2] in MODALITIES else None


@pytest.mark.parametrize("modality", registry.modalities())
def test_the_light_half_needs_no_torch(modality: str) -> None:
    code = (
        "import sys; from mmspec import registry; "
        f"assert registry.get({modality!r}).settings is not None; "
        "assert not {'torch', 'transformers', 'diffusers', 'numpy'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# modules of ours that a first `accelerate` of a vision-language model may import, beside the light
# halves: every further modality has one, and it is read to know whose the model is
MOST = 70
FIRST = """
import json, sys
import mmspec
from tests import toys
model = toys.model("llava")
before = {name for name in sys.modules if name.split(".")[0] == "mmspec"}
mmspec.accelerate(model)
print(json.dumps(sorted(n for n in sys.modules if n.split(".")[0] == "mmspec")))
"""


def test_a_language_model_does_not_load_what_draws() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = [name for name in json.loads(done.stdout) if _owner(name) in (None, "vlm")]
    assert len(loaded) <= MOST, f"{len(loaded)}: {' '.join(loaded)}"
