"""Who imports whom: one direction, no circles, nothing late, no modality named outside its room.

The map, from below. A module may import what stands below it, and its own folder; the plugs of
modalities are found by name when they are needed, so nothing imports them at all.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from mmspec import registry
from tests.forks import ProcessResult, run_forked

ROOT = Path(__file__).resolve().parents[1]
SHELVES = ("modalities", "compressors", "verifiers")
FLOORS = (
    ("errors", "_attributes", "_renamed"),
    ("trees", "_hf", "_hf_beams", "_hf_cache", "_hf_positions"),
    ("distributions",),
    ("draft", "stats"),
    ("targets",),
    ("models",),
    ("codes", "formats"),
    ("compressors",),
    ("recipe",),
    ("drafters", "verifiers"),
    ("training",),
    ("recipes",),
    ("decode", "beams", "modality", "registry"),
    ("zoo",),
    ("streaming", "saving", "tracing"),
    ("accelerated", "draft_models"),
    ("modalities",),  # what binds a model to a recipe
    ("api", "__init__"),
    ("serving",),
    ("bench", "edge", "ray"),
    ("making and measuring",),  # modalities/<name>/measures: how it is judged
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(FLOORS) for room in rooms}
MEASURING = (
    *("checkpoints", "formatting", "doctor", "doctor_tokens", "sheets", "clips"),
    *("round_maps", "rendering", "quality", "audio_quality"),
    *("training_data", "consensus", "verdicts", "video_rag", "document_answers", "measures"),
    "page_drafts",
    *("tiny_models", "certificates", "mixture", "sample_tests", "row_costs", "image_distance"),
    *("survey", "tiny_configs", "tiny_requests", "serving", "conversation"),
    *("tiny_networks", "tiny_text", "tiny_pipelines", "noise_replay"),
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
    top = {id(node) for node in tree.body}
    for node in _statements(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for target in _targets(node):
            if target in modules() and target != name:
                yield Import(name, target, node.lineno, id(node) not in top)


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """All but what is read by type checkers alone; imports do not stand in expressions."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        if field == "body" and isinstance(block, ast.If) and _is_for_checkers(block):
            continue
        for one in getattr(block, field, ()):
            yield one
            yield from _statements(one)


def _is_for_checkers(block: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.dump(block.test)


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
    done = light_halves()[modality]
    assert done.status == 0, done.err


@lru_cache(maxsize=1)
def light_halves() -> dict[str, ProcessResult]:
    code = (
        "import sys; from mmspec import registry; "
        "assert registry.get({!r}).settings is not None; "
        "assert not {{'torch', 'transformers', 'diffusers', 'numpy'}} & {{*sys.modules}}"
    )
    codes = {name: code.format(name) for name in registry.modalities()}
    done = run_forked([*codes.values()])
    return {name: done[code] for name, code in codes.items()}


# modules of ours that a first `accelerate` of a vision-language model may import, beside the light
# halves: every further modality has one, and it is read to know whose the model is
MOST = 85
FIRST = """
import mmspec
from tests import toys
mmspec.accelerate(toys.model("llava"))
"""
PARTS: dict[str, tuple[str, set[str]]] = {  # what is imported; all that comes with it of a folder
    "import mmspec.verifiers.exact": ("verifiers", {"exact", "walk"}),
    "from mmspec.verifiers import parse_verifier; parse_verifier('coupled')": (
        "verifiers",
        {"coupled", "walk"},
    ),
    "from mmspec.compressors import parse_compressor; parse_compressor('identity')": (
        "compressors",
        {"identity", "contract", "selection"},
    ),
    "import mmspec.drafters.plain": ("drafters", {"plain"}),
}
TOLD = """
import json, sys
print(json.dumps([name for name in sys.modules if name.split(".")[0] == "mmspec"]))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """Our modules, by the code that was run behind an import of toys, which are none of them."""
    codes = {code: f"{code}\n{TOLD}" for code in (FIRST, *PARTS)}
    done = run_forked([*codes.values()], "tests.toys")
    assert not [one.err for one in done.values() if one.status]
    return {name: json.loads(done[code].out) for name, code in codes.items()}


def test_a_language_model_does_not_load_what_draws(imported: dict[str, list[str]]) -> None:
    loaded = [name for name in imported[FIRST] if _owner(name) in (None, "vlm")]
    assert len(loaded) <= MOST, f"{len(loaded)}: {' '.join(loaded)}"


@pytest.mark.parametrize("code", PARTS)
def test_one_part_is_imported_without_the_others(code: str, imported: dict[str, list[str]]) -> None:
    folder, wanted = PARTS[code]
    above = f"mmspec.{folder}."
    found = {name.removeprefix(above) for name in imported[code] if name.startswith(above)}
    assert found == wanted
