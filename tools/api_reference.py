"""Write the API reference from docstrings: `docs/api.md` and `docs/reference/api/*.md`.

Run `python -m tools.api_reference` after a change to a public name or its docstring; a test
compares. The sources are parsed and not imported, so signatures keep their comments, such as the
shapes of tensors, and the pages do not depend on installed packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "docs" / "api.md"
PAGES = ROOT / "docs" / "reference" / "api"
COMMAND = "python -m tools.api_reference"
HEADER = f"<!-- Made by `{COMMAND}`; do not edit. -->\n"

TOP_LEVEL = {  # names of `mmspec`, and the modules that define them
    "accelerate": "mmspec.api",
    "Accelerated": "mmspec.accelerated",
    "load": "mmspec.api",
    "decode_plain": "mmspec.api",
    "Engine": "mmspec.serving.engine",
    "Output": "mmspec.modalities.common.text_generation",
    "Stats": "mmspec.stats",
    "Recipe": "mmspec.recipe",
    "Trace": "mmspec.tracing.trace",
    "Grammar": "mmspec.distributions.grammar",
    "StatefulProcessor": "mmspec.distributions.call_state",
}
RESULTS = {  # what the calls of the modalities return, beside `Output`
    "Transcription": "mmspec.modalities.speech.recognition.transcription",
    "Speech": "mmspec.modalities.speech.speech_loop",
    "Images": "mmspec.modalities.image.generation",
    "FlowActions": "mmspec.modalities.vla.flow",
    "ActionStep": "mmspec.modalities.vla.step_stats",
}
CONTRACTS = ("mmspec.draft", "mmspec.recipe", "mmspec.modality")
PACKAGES = ("mmspec.drafters", "mmspec.verifiers", "mmspec.compressors")  # and those inside
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Example|Examples):$")

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Module:
    """A parsed file."""

    name: str
    lines: Sequence[str]
    tree: ast.Module

    @property
    def summary(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def public(self) -> list[Definition]:
        """The public classes and functions that the file defines, in its order."""
        found = [one for one in self.tree.body if isinstance(one, Definition)]
        return [one for one in found if not one.name.startswith("_")]

    @property
    def classes(self) -> list[Definition]:
        return [one for one in self.public if isinstance(one, ast.ClassDef)]

    @property
    def functions(self) -> list[Definition]:
        return [one for one in self.public if isinstance(one, ast.FunctionDef)]

    def find(self, name: str) -> Definition:
        return next(one for one in self.public if one.name == name)


@lru_cache(maxsize=512)
def read(name: str) -> Module:
    """Parse the file of a module or package."""
    path = ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    return Module(name, text.splitlines(), ast.parse(text))


def packages_below(package: str) -> Iterator[str]:
    """The package, and those inside it."""
    yield package
    for path in sorted(ROOT.joinpath(*package.split(".")).iterdir()):
        if (path / "__init__.py").is_file():
            yield from packages_below(f"{package}.{path.name}")


def modules_of(package: str) -> Iterator[Module]:
    """The modules of a package in the order of their names."""
    for path in sorted(ROOT.joinpath(*package.split(".")).glob("*.py")):
        if path.stem != "__init__":
            yield read(f"{package}.{path.stem}")


def pages() -> dict[Path, str]:
    """The text of every page."""
    made = {"mmspec.modalities": _modalities(), "mmspec.recipes": _recipes()}
    made |= {name: _module_page(read(name)) for name in CONTRACTS}
    below = [name for package in PACKAGES for name in packages_below(package)]
    made |= {name: _package_page(name) for name in below}
    links = [f"- [`{name}`](reference/api/{name}.md): {_title(name)}" for name in sorted(made)]
    entries = [
        _entry(read(home), read(home).find(name), "mmspec") for name, home in TOP_LEVEL.items()
    ]
    index = [
        "# API reference",
        "Made from the docstrings. How-to guides are listed in the [user guide](index.md).",
        "\n".join(links),
        "## mmspec",
        *entries,
    ]
    found = {PAGES / f"{name}.md": _join([text]) for name, text in made.items()}
    return {INDEX: _join(index), **found}


def _title(name: str) -> str:
    if name == "mmspec.modalities":
        return "What `accelerate` returns for each kind of model."
    if name == "mmspec.recipes":
        return "All recipes, and how to find them."
    return _escape(read(name).summary.partition("\n")[0])


def _join(parts: Sequence[str]) -> str:
    return HEADER + "\n" + "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _modalities() -> str:
    """The classes that `accelerate` returns, and the results of their calls."""
    parts = ["# mmspec.modalities", _title("mmspec.modalities")]
    for package in packages_below("mmspec.modalities"):
        for module in modules_of(package):
            if not module.name.endswith(".accelerated"):
                continue
            parts += [_entry(module, one) for one in module.classes]
    parts.append("## Results")
    parts += [_entry(read(home), read(home).find(name)) for name, home in RESULTS.items()]
    return "\n\n".join(parts)


def _recipes() -> str:
    package = read("mmspec.recipes")
    parts = ["# mmspec.recipes", _markdown(package.summary), "## Functions"]
    parts += [_entry(package, one) for one in package.functions]
    parts.append("## Recipes")
    for module in modules_of("mmspec.recipes"):
        name = module.name.rpartition(".")[2].replace("_", "-")
        parts += [f"### {name}", _markdown(module.summary)]
    return "\n\n".join(parts)


def _module_page(module: Module) -> str:
    entries = [_entry(module, one) for one in module.public]
    return "\n\n".join([f"# {module.name}", _markdown(module.summary), *entries])


def _package_page(name: str) -> str:
    package = read(name)
    parts = [f"# {name}", _markdown(package.summary)]
    parts += [_entry(package, one) for one in package.functions]
    for module in modules_of(name):
        found = module.classes
        if found:
            parts += [f"## {module.name}", _markdown(module.summary)]
            parts += [_entry(module, one) for one in found]
    return "\n\n".join(parts)


def _entry(module: Module, node: Definition, path: str | None = None) -> str:
    """The heading, signature, docstring and methods; `path` is where users import it from."""
    parts = [f"### {node.name}", f"`{path or module.name}.{node.name}`"]
    parts += [_code(_signature(module, node)), _markdown(ast.get_docstring(node) or "")]
    if isinstance(node, ast.ClassDef):
        for one in node.body:
            if not isinstance(one, ast.FunctionDef) or re.match("_(?!_call__$)", one.name):
                continue
            if text := ast.get_docstring(one):
                parts += [f"**`{node.name}.{one.name}`**", _code(_signature(module, one))]
                parts.append(_markdown(text))
    return "\n\n".join(part for part in parts if part)


def _signature(module: Module, node: Definition) -> list[str]:
    """The lines of a definition up to its docstring, and the public fields of a class."""
    kept = ("property", "classmethod", "staticmethod", "cached_property")
    shown = [f"@{ast.unparse(one)}" for one in node.decorator_list]
    shown = [one for one in shown if one.removeprefix("@") in kept]
    first = node.body[0]
    decorators = first.decorator_list if isinstance(first, Definition) else []
    end = min([first.lineno, *(one.lineno for one in decorators)]) - 1
    head = [*module.lines[node.lineno - 1 : max(end, node.lineno)]]
    if isinstance(node, ast.FunctionDef):
        return [*shown, *_dedent(head)]
    is_enumeration = any(ast.unparse(base).endswith("Enum") for base in node.bases)
    fields = [
        line
        for one in node.body
        if isinstance(one, ast.AnnAssign) or (is_enumeration and isinstance(one, ast.Assign))
        for name in (one.target if isinstance(one, ast.AnnAssign) else one.targets[0],)
        if isinstance(name, ast.Name) and not name.id.startswith("_")
        for line in module.lines[one.lineno - 1 : one.end_lineno]
    ]
    return _dedent([*head, *fields])


def _dedent(lines: Sequence[str]) -> list[str]:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return [line[indent:] for line in lines]


def _code(lines: Sequence[str], language: str = "py") -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _markdown(docstring: str) -> str:
    """A docstring as Markdown: sections become lists, indented drawings and examples code."""
    parts: list[str] = []
    blocks = re.split(r"\n\n+", cleandoc(docstring))
    for block in blocks:
        title, _, rest = block.partition("\n")
        section = SECTION.match(title)
        if section is None:
            parts.append(_paragraph(block))
        elif section[1].startswith("Example"):
            parts += ["**Example**", _code(_dedent(rest.splitlines()), "pycon")]
        else:
            lines = _dedent(rest.splitlines())
            named = section[1] in ("Args", "Raises")
            parts += [f"**{section[1]}**", _items(lines) if named else _escape("\n".join(lines))]
    return "\n\n".join(part for part in parts if part)


def _paragraph(block: str) -> str:
    """Indented lines are code; the others are text, in which a list keeps its lines."""
    made: list[str] = []
    lines = block.splitlines()
    at = 0
    while at < len(lines):
        run = at
        is_code = lines[at].startswith("    ")
        while run < len(lines) and lines[run].startswith("    ") == is_code:
            run += 1
        some = lines[at:run]
        made.append(_code(_dedent(some), "text") if is_code else _escape("\n".join(some)))
        at = run
    return "\n\n".join(made)


def _items(lines: Sequence[str]) -> str:
    """`name: text` entries, whose further lines are indented, as a list."""
    made = []
    for line in lines:
        name, separator, text = line.partition(": ")
        if line.startswith(" ") or not separator:
            made.append(f"  {_escape(line.strip())}")
        else:
            made.append(f"- `{name}`: {_escape(text)}")
    return "\n".join(made)


def _escape(text: str) -> str:
    """Escape what Markdown would format, outside of code spans."""
    pieces = re.split(r"(`[^`]*`)", text)
    for at in range(0, len(pieces), 2):
        pieces[at] = re.sub(r"([*_\[\]|])", r"\\\1", pieces[at]).replace("<", "&lt;")
    return "".join(pieces)


def write() -> None:
    """Write all pages, and remove those that are no longer made."""
    made = pages()
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in PAGES.glob("*.md"):
        if path not in made:
            path.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
