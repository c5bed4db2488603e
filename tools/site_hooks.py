"""Hooks of MkDocs: the site has a gallery of traces, a landing page, and all pages of docs/.

Pages of traces are made from docs/traces/*.jsonl when the site is built, and pages of notebooks
from docs/notebooks/*.ipynb. Links that leave docs/ lead to the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from mmspec.tracing.jsonl import read_jsonl
from mmspec.tracing.page import make_page

TRACES = {  # file of docs/traces: what its request was
    "text": "Text: a picture described, with a tree of drafts",
    "image": "Image tokens: a picture by Jacobi decoding",
    "diffusion": "Diffusion: denoising steps sampled speculatively",
    "forecast": "Diffusion: features forecast and checked",
    "speech": "Speech: codes of a sentence",
    "robot": "Robot: an episode with a tolerance",
    "compressor": "A compressor: what the draft model saw of the picture",
}
RESULTS = ("results.md", "ranking.md")
FIRST = ("index.md", "choose.md", "api.md", "recipes.md", "models.md", "gallery.md", *RESULTS)
LANDING = """# mmspec

**Speculative decoding for multimodal Hugging Face models: the same answers, sooner.** Something
cheap proposes, the model checks many proposals in one forward, a rule decides what to keep.
Below, one request as it happened: blue underlined words were drafted, and the target only
checked them.

<iframe class="trace" src="traces/text.html#autoplay" title="A trace, playing"></iframe>

[Choose your recipe](choose.md) - [Notebooks](notebooks/vlm.md) - [Gallery of traces](gallery.md) -
[All recipes](recipes.md)

"""
_NOTEBOOK = re.compile(r"(\]\((?:\.\./)*notebooks/[\w-]+)\.ipynb\)")
_LINK = re.compile(r"(\]\()([^)#\s:]+)([^)]*\))")


def on_config(config: Any) -> Any:
    """Make the navigation of all pages, so that a new one needs no entry."""
    root = Path(config["docs_dir"])
    guides = sorted(one.name for one in root.glob("*.md") if one.name not in FIRST)

    def pages(folder: str) -> list[str]:
        found = sorted((root / folder).glob("*.md"))
        return [one.relative_to(root).as_posix() for one in found]

    names = [one.stem for one in sorted((root / "notebooks").glob("*.ipynb"))]
    config["nav"] = [
        {"Start": ["index.md", "choose.md", "gallery.md"]},
        {"Notebooks": [f"notebooks/{name}.md" for name in names]},
        {"How to": guides},
        {"Results": [*(one for one in RESULTS if (root / one).exists()), *pages("measurements")]},
        {"Reference": ["recipes.md", "models.md", *pages("reference")]},
        {"API": [{"mmspec": "api.md"}, *({Path(one).stem: one} for one in pages("reference/api"))]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of traces, the gallery that shows them, and the pages of notebooks."""
    root = Path(config["docs_dir"])
    folder = root / "traces"
    for name in TRACES:
        page = make_page(*read_jsonl(folder / f"{name}.jsonl"))
        files.append(File.generated(config, f"traces/{name}.html", content=page))
    files.append(File.generated(config, "gallery.md", content=make_gallery()))
    for file in sorted((root / "notebooks").glob("*.ipynb")):
        text = read_notebook(file)
        files.append(File.generated(config, f"notebooks/{file.stem}.md", content=text))
    return files


def read_notebook(file: Path) -> str:
    """The Markdown of a notebook, with its outputs in it."""
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    inside = Config({"ExtractOutputPreprocessor": {"enabled": False}})  # pictures stay in the page
    make: Any = MarkdownExporter
    exporter = make(config=inside)
    text, _ = exporter.from_filename(str(file))
    text = re.sub(r"!\[(png|jpeg)\]\(data:", "![output of the cell above](data:", text)
    title, _, rest = text.lstrip().partition("\n")
    source = f"A notebook that runs without downloads: [{file.name}]({file.name}){{ download }}.\n"
    return f"{title}\n\n{source}{rest}"


def make_gallery() -> str:
    """The page that shows all traces."""
    parts = [
        "# Gallery\n\nTraces of requests to the bundled models, made by `mmspec generate --trace`. "
        "Every frame is the page itself; [how to make one](trace.md).\n"
    ]
    for name, title in TRACES.items():
        frame = f'<iframe class="trace" src="../traces/{name}.html" title="{title}" loading="lazy">'
        parts.append(f"## {title}\n\n{frame}</iframe>\n\n[Open it alone](traces/{name}.html)\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The landing page; links to files outside of docs/ lead to the repository."""
    place = posixpath.dirname(page.file.src_uri)
    home = f"{config['extra']['repository']}/blob/main/"

    def redirect(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", place, link[2]))
        inside = target.startswith("docs/")
        return link[0] if inside else f"{link[1]}{home}{target}{link[3]}"

    text = _NOTEBOOK.sub(r"\1.md)", _LINK.sub(redirect, markdown))
    if page.file.src_uri == "index.md":
        return LANDING + text.replace("# User guide\n", "## User guide\n", 1)
    return text
