"""What the README and the guide show is what the package does."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module, util
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import mmspec
from mmspec import formats, recipes, registry, zoo
from mmspec.cli.app import app
from mmspec.cli.app import commands as app_commands
from mmspec.cli.options import DefaultGroup
from mmspec.modalities.common import sound
from mmspec.modalities.speech.frames import tiny_models as frames
from mmspec.modalities.vlm.formatting import CLIP, SCENE, format_chat
from mmspec.zoo import language
from tests.modalities.speech import recognisers
from tests.modalities.vla import policies
from tests.modalities.vla import test_flow as flow_policies
from tests.toys import speech_models

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {"README.md": ROOT / "README.md"} | {
    path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))
}
# the folders of a user's own: some of the zoo stand in their places
FOLDERS = {
    "diffusion.md": {"DIR": "diffusion"},
    "images.md": {"DIR": "mar", "SMALL": "mar-drafter"},
    "reference/diffusion.md": {"DIR": "diffusion"},
    "reference/images.md": {"DIR": "mar", "SMALL": "mar-drafter"},
}


def groups() -> Iterator[str]:
    """The groups of entry points that the package reads: GROUP of the modules that ask for them."""
    top = ROOT / "mmspec"
    for path in (
        *top.glob("*.py"),
        *top.glob("*/**/*.py"),
    ):  # modalities/ is a link: rglob stops there
        if re.search(r"\bentry_points\(", path.read_text(encoding="utf-8")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield import_module(name.removesuffix(".__init__")).GROUP


GROUPS = frozenset(groups())


def text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def between(page: str, name: str) -> str:
    found = re.search(rf"<!-- {name}:start -->\n(.*?)<!-- {name}:end -->", text(page), re.DOTALL)
    assert found is not None, f"{page} has no {name} section"
    return found.group(1).strip()


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def is_slow(page: str, code: str) -> bool:
    is_long = any(one in code for one in ("num_inference_steps=100", "streaming-codec"))
    return is_long or "cspd" in code or page == "text.md"


SNIPPETS = [(page, code) for page in PAGES for code in blocks(page, "python")]


def commands() -> Iterator[tuple[str, str]]:
    """Everything that is typed: lines of blocks, and what stands between backticks."""
    for page in PAGES:
        lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
        whole = re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)
        lines += [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", whole)]
        for line in lines:
            for part in line.split("&&"):
                if part.split()[:1] == ["mmspec"] and len(part.split()) > 1:
                    yield page, part.strip()


COMMANDS = sorted(set(commands()))


def test_the_recipe_table_is_generated_from_the_folder() -> None:
    printed = CliRunner().invoke(app, ["recipes", "--markdown"])
    assert printed.exit_code == 0
    assert between("recipes.md", "recipes") == printed.stdout.strip(), (
        "run `mmspec recipes --write`"
    )


def test_parts_and_usual_recipes_of_all_modalities_stand_in_the_guide() -> None:
    chapter = text("index.md").partition("## Choosing a recipe")[2].partition("\n## ")[0]
    table = text("reference/options.md").partition("| modality | parts |")[2]
    lines = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    for name, one in registry.modalities().items():
        for usual in filter(None, (one.recipe, one.recipe_with_drafter)):
            assert f"`{usual}`" in chapter, f"{name} takes {usual} if nothing is said"
        (row,) = [line for line in lines if f"`{name}`" in line.split("|")[1]]
        for part in one.parts:
            assert f"{part}=" in row, f"{name} takes {part}="


def test_the_measured_table_names_its_command() -> None:
    assert "mmspec bench" in between("README.md", "bench")


def test_the_first_figures_of_the_readme_are_those_of_its_table() -> None:
    begin = text("README.md").partition("## Set up")[0]
    figures = re.findall(r"\d+\.\d+x", begin)
    assert len(figures) == 2
    assert all(one in between("README.md", "bench") for one in figures)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_that_is_shown_exists(page: str, command: str) -> None:
    words = shlex.split(command)[1:]
    found = app_commands()
    while words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    if isinstance(found, DefaultGroup) and words:
        known = {"recipe": ("RECIPE", *recipes.names()), "head": ("FORMAT", *formats.names())}
        first = next(iter(found.commands))
        assert words[0] in known[first], command
        found = found.commands[first]
    assert not hasattr(found, "commands") or not words or words[0].startswith("-"), command
    known = {name: one for one in found.params for name in (*one.opts, *one.secondary_opts)}
    for name, value in zip(words, [*words[1:], ""], strict=False):
        if name.startswith("-"):
            assert name in {*known, "--help"}, f"{command}: no option {name}"
        if name == "--recipe" and value.islower():
            assert value in {*recipes.names(), "all"}, f"{command}: no recipe {value}"
        if name.startswith("zoo:"):
            bundled = ("zoo:NAME", SCENE, CLIP)
            assert name in bundled or zoo.is_present(name.removeprefix("zoo:")), command


@pytest.mark.parametrize("page", PAGES)
def test_every_name_that_is_shown_exists(page: str) -> None:
    shown = re.findall(r"`(mmspec(?:\.\w+)+)(?:\([^`]*\))?`", text(page))
    for name in shown:
        assert name in GROUPS or exists(name), f"{page} names {name}, which there is not"


@pytest.mark.parametrize("page", PAGES)
def test_every_entry_point_that_is_shown_is_read(page: str) -> None:
    for group in re.findall(r'entry-points\."(.*?)"', text(page)):
        assert group in GROUPS, f"{page} names the group {group}, which nothing reads"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        place = (PAGES[page].parent / file) if file else PAGES[page]
        assert place.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(place.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_shown_exists(page: str) -> None:
    for name in re.findall(r"`((?:mmspec|modalities|demos|tests|verifiers)/[\w/.]*)`", text(page)):
        roots = (ROOT, ROOT / "tests") if page == "reference/tests.md" else (ROOT,)
        assert any((root / name).exists() for root in roots), f"{page} names {name}"


@pytest.mark.parametrize(("page", "code"), SNIPPETS, ids=[page for page, _ in SNIPPETS])
def test_every_import_of_a_snippet_works(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert all(exists(f"{node.module}.{one.name}") for one in node.names), code


@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, marks=pytest.mark.exhaustive if is_slow(page, code) else ())
        for page, code in SNIPPETS
    ],
    ids=[page for page, _ in SNIPPETS],
)
def test_every_snippet_runs(
    page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in FOLDERS.get(page, {}).items():
        (tmp_path / folder).symlink_to(zoo.path(name))
    names = dict(given(page))
    if topic(page) == "speech.md":
        sound.write(tmp_path / "memo.wav", names["samples"], recognisers.RATE_HZ)
    if page == "README.md":  # a whole program: a bundled model takes the place of the hub's
        code = code.replace("llava-hf/llava-1.5-7b-hf", str(zoo.path("llava")))
        copyfile(zoo.bundled_scene(), tmp_path / "picture.png")
    torch.manual_seed(0)
    exec(code, names)  # the page's own lines
    if "fast(" in code or "fast.generate" in code or "custom_generate=fast" in code:
        assert names["fast"].last_stats.num_new_tokens
    if page == "README.md":
        assert names["out"].sequences.shape[1] > names["inputs"]["input_ids"].shape[1] + 10
        assert names["out"].stats.exact


@lru_cache(maxsize=1)
def language_names() -> dict[str, Any]:
    model, processor = zoo.load("llava"), zoo.processor("llava")
    example = language.examples(1, split="held-out")[0]
    prompt = language.format_prompt(processor, example.prompt)
    inputs = processor(images=example.image, text=prompt, return_tensors="pt")
    return {
        "mmspec": mmspec,
        "model": model,
        "small": zoo.load("llava-text-drafter"),
        "processor": processor,
        "image": example.image,
        "prompt": prompt,
        "inputs": inputs,
    }


@lru_cache(maxsize=1)
def text_names() -> dict[str, Any]:
    tokenizer = zoo.processor("text")
    prompt = format_chat(tokenizer, "small red circle top left. write a long caption.", ())
    names = {"model": zoo.load("text"), "tokenizer": tokenizer}
    return {**names, "mmspec": mmspec, "inputs": dict(tokenizer(prompt, return_tensors="pt"))}


@lru_cache(maxsize=1)
def drawing_names() -> dict[str, Any]:
    return {"mmspec": mmspec, "model": zoo.load("image"), "processor": zoo.processor("image")}


@lru_cache(maxsize=1)
def speaking_names() -> dict[str, Any]:
    return {
        "mmspec": mmspec,
        "lm": speech_models.speaker(),
        "small": speech_models.speaker(seed=1, layers=1),
        "codec": speech_models.codec(),
        "tokenizer": speech_models.words(),
        "musicgen": frames.musicgen(),
        "small_musicgen": frames.musicgen(1, layers=1),
        "dia": frames.dia(2),
        "small_dia": frames.dia(3, layers=1),
        "dia_processor": frames.dia_processor(),
        "inputs": {"input_ids": torch.tensor([[2, 3, 4]])},
        "transformers": transformers,
        "whisper": recognisers.whisper(),
        "small_whisper": recognisers.whisper(seed=1, layers=1),
        "processor": recognisers.processor(),
        "samples": recognisers.noise(1.0),
        "transcripts": ["red circle", "red square"],
    }


def topic(page: str) -> str:
    """The how-to whose names a page uses: images.md of reference/images.md."""
    return page.rpartition("/")[2]


def given(page: str) -> dict[str, Any]:
    """What a page takes as there: a model, its processor, a request."""
    page = topic(page)
    if page == "images.md":
        return drawing_names()
    if page == "speech.md":
        return speaking_names()
    if page == "robots.md":
        names = {"model": policies.policy(), "processor": policies.processor()}
        policy = mmspec.accelerate(names["model"], "hold-last", processor=names["processor"])
        names |= {"mmspec": mmspec, "picture": policies.picture(), "policy": policy}
        asked = {k: v for k, v in flow_policies.request().items() if k != "noise"}
        return {**names, "pi0": flow_policies.policy(), "inputs": asked}
    if page == "edge.md":  # nobody serves: the device goes on alone
        words = torch.tensor([[5, 6, 7]])
        return {
            "small": language_names()["small"],
            "token": 16 * "s",
            "inputs": {"input_ids": words},
        }
    if page == "text.md":
        return text_names()
    if page in ("README.md", "vlm.md", "serving.md", "trace.md"):
        names = language_names()
        return {**names, "fast": mmspec.accelerate(names["model"])}
    return {}


def exists(name: str) -> bool:
    """Whether this is a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            if util.find_spec(".".join(parts[:cut])) is None:
                continue
        except ModuleNotFoundError:
            continue
        found: Any = import_module(".".join(parts[:cut]))
        for one in parts[cut:]:
            if not hasattr(found, one):
                return False
            found = getattr(found, one)
        return True
    return False


def anchors(page: str) -> set[str]:
    """Headings of a page as GitHub links to them."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in titles}
