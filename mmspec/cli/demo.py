"""`mmspec demo`: a page to try recipes on, one tab per modality, with a trace beside every answer.

It is made of what the command line knows: models, recipes, settings. Requests run one at a time.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from dataclasses import Field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, get_type_hints

from mmspec import registry, zoo
from mmspec.cli.models import LoadedModels, load, select, set_threads
from mmspec.cli.options import ModelOptions, select_settings
from mmspec.cli.output import console
from mmspec.cli.trace import make_trace
from mmspec.draft import Round
from mmspec.modality import Modality
from mmspec.registry import ZOO
from mmspec.tracing.page import make_page
from mmspec.tracing.words import Words

PARTS = ("length", "tree", "compressor")  # of drafts, where the modality has them
EXAMPLES = {"image": zoo.bundled_scene}  # of files that a setting reads
SOUNDS = (".wav",)
MOST_MODELS = 2  # that stay loaded
Update = tuple[str, str, str | None, str | None, str]  # live, text, picture, sound, trace


def run(host: str, port: int, threads: int | None) -> None:
    """Serve the page until interrupted. Raises ValueError without gradio."""
    if find_spec("gradio") is None:
        raise ValueError("mmspec demo needs gradio; install mmspec[demo]")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # it would call its makers
    set_threads(threads, ZOO)
    page = build(import_module("gradio"))
    console().print(f"http://{host}:{port}", markup=False)
    page.queue(default_concurrency_limit=1).launch(
        server_name=host, server_port=port, share=False, quiet=True
    )


def build(gradio: Any) -> Any:
    """The page: a tab per modality that has bundled models."""
    with gradio.Blocks(title="mmspec", analytics_enabled=False) as page:
        gradio.Markdown(
            "# mmspec\nOne request at a time; the trace of each opens below its answer."
        )
        for owner in registry.modalities().values():
            targets = [f"{ZOO}{one.name}" for one in owner.zoo if one.target is None]
            if targets:
                with gradio.Tab(owner.name):
                    _add_tab(gradio, owner, targets)
    return page


def _add_tab(gradio: Any, owner: Modality, targets: Sequence[str]) -> None:
    """The form of a modality, and where its answers are shown."""
    fields = _list_fields(owner)
    parts = [name for name in PARTS if name in owner.parts]
    draws = bool(owner.files) and SOUNDS[0] not in owner.files
    with gradio.Row():
        with gradio.Column(scale=1):
            model = gradio.Dropdown(
                [*targets], value=targets[0], label="model", allow_custom_value=True
            )
            recipe = gradio.Dropdown(
                _list_recipes(owner, targets[0]), value=None, label="recipe (empty: the model's)"
            )
            prompt = gradio.Textbox(owner.example_prompt, label="prompt", lines=2)
            seed = gradio.Number(0, label="seed", precision=0)
            drafting = [gradio.Textbox("", label=f"{name} (empty: the recipe's)") for name in parts]
            with gradio.Accordion("settings", open=False):
                settings = [_make_input(gradio, owner, one) for one in fields]
                overrides = gradio.Textbox("", label="options, NAME=VALUE a line", lines=2)
            start = gradio.Button("Generate", variant="primary")
        with gradio.Column(scale=2):
            live = gradio.HTML(label="as it comes")
            text = gradio.Textbox(label="answer", interactive=False)
            picture = gradio.Image(label="picture", visible=draws, type="filepath")
            sound = gradio.Audio(label="sound", visible=SOUNDS[0] in owner.files, type="filepath")
    trace = gradio.HTML()

    def answer(*values: Any) -> Iterator[Update]:
        try:
            yield from generate(make_options(owner, parts, fields, values[1:]), str(values[0]))
        except (ValueError, OSError) as error:
            raise gradio.Error(str(error), duration=None) from error

    model.change(
        lambda name: gradio.Dropdown(_list_recipes(owner, name), value=None), model, recipe
    )
    given = [prompt, model, recipe, seed, overrides, *drafting, *settings]
    start.click(answer, given, [live, text, picture, sound, trace], api_name=owner.name)


def _list_fields(owner: Modality) -> list[Field[Any]]:
    """The settings of a form: not those that write files beside the answer."""
    return [one for one in select_settings(owner, "generate") if not one.metadata.get("writes")]


def _list_recipes(owner: Modality, model: str) -> list[str]:
    """The recipes that fit and have weights; none for a model that cannot be read."""
    try:
        return [*select(ModelOptions(model or None, owner.name, recipe=["all"])).recipes]
    except (ValueError, OSError):
        return []


def _make_input(gradio: Any, owner: Modality, one: Field[Any]) -> Any:
    """The input of one setting, by its type."""
    label, kind = (
        f"{one.name}: {one.metadata['help']}",
        str(get_type_hints(owner.settings)[one.name]),
    )
    if "reads" in one.metadata:
        example = EXAMPLES.get(one.metadata["reads"])
        return gradio.File(None if example is None else str(example()), label=label)
    if one.metadata.get("choices"):
        return gradio.Dropdown(["", *one.metadata["choices"]], value="", label=label)
    if "bool" in kind:
        return gradio.Checkbox(bool(one.default), label=label)
    if "int" in kind or "float" in kind:
        return gradio.Number(None, label=label, precision=0 if "int" in kind else None)
    return gradio.Textbox("", label=label)


def make_options(
    owner: Modality, parts: Sequence[str], fields: Sequence[Field[Any]], values: Sequence[Any]
) -> ModelOptions:
    """The options of a form: model, recipe, seed and overrides, then `parts`, then settings."""
    model, recipe, seed, overrides, *rest = values
    drafting = {name: value for name, value in zip(parts, rest, strict=False) if value}
    settings = dict(zip((one.name for one in fields), rest[len(parts) :], strict=True))
    usual = {one.name: one.default for one in fields}
    return ModelOptions(
        model or None,
        owner.name,
        recipe=[recipe] if recipe else None,
        seed=int(seed or 0),
        overrides=[line.strip() for line in overrides.splitlines() if line.strip()] or None,
        settings={
            name: value
            for name, value in settings.items()
            if value not in (None, "") and value != usual[name]
        },
        **drafting,
    )


def generate(options: ModelOptions, prompt: str) -> Iterator[Update]:
    """Run one request: what came so far after every round, then the answer and its trace."""
    loaded = _load_cached(_Key(options))
    selected = loaded.selection
    fast, trace = loaded.accelerate(selected.recipe), make_trace(loaded, prompt)
    request = {**loaded.formatter.request([prompt]), "seed": options.seed, "trace": trace}
    call = selected.owner.command_call or fast.calls[0]
    words, shown = Live(trace.processor), ""
    rounds = fast.stream(**request, call=call)
    while True:
        try:
            shown = words.add(next(rounds))
        except StopIteration as done:
            output = done.value
            break
        yield shown, "", None, None, ""
    files = _render(loaded, output)
    page = html.escape(make_page(trace.header, trace.rounds), quote=True)
    frame = f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="Trace" {FRAME}></iframe>'
    picture, sound = (
        files if is_sound == (Path(files or "x").suffix in SOUNDS) else None
        for is_sound in (False, True)
    )
    yield shown, loaded.formatter.text(output) or "", picture, sound, frame


FRAME = 'style="width:100%;height:1200px;border:1px solid #8888;border-radius:8px"'


def _render(loaded: LoadedModels, output: Any) -> str | None:
    """The file of an answer that is no text."""
    endings = loaded.selection.owner.files
    if not endings or loaded.formatter.text(output) is not None:
        return None
    place = Path(mkdtemp(prefix="mmspec-demo-")) / f"answer{endings[0]}"
    return str(loaded.formatter.render(output, place)[0])


class Live:
    """The rounds of a request so far, as HTML: accepted words are underlined."""

    def __init__(self, processor: Any) -> None:
        self.words = None if processor is None else Words(processor, skips_special=True)
        self.latest: list[int] = []
        self.parts: list[str] = []
        self.rounds = self.drafted = self.accepted = self.new = 0

    def add(self, round_: Round) -> str:
        """The text, or the counts where there is none, up to this round; of the first row."""
        self.rounds += 1
        self.drafted += round_.drafted[0] if round_.drafted else 0
        self.accepted += round_.accepted[0] if round_.accepted else 0
        tokens = round_.tokens[0] if round_.tokens else ()
        self.new += len(tokens)
        if self.words is not None:
            for place, word in enumerate(self.words.spell(tokens, self.latest)):
                mark = "u" if place < round_.accepted[0] else "span"
                self.parts.append(f"<{mark}>{html.escape(word)}</{mark}>")
            self.latest = [*self.latest, *tokens][-8:]
        accepted = f"{self.accepted} of {self.drafted} drafted accepted"
        counts = f"{self.new} new, {accepted}, round {self.rounds}"
        return f"<p>{''.join(self.parts)}</p><p><small>{counts}</small></p>"


class _Key:
    """Options by what is loaded for them."""

    def __init__(self, options: ModelOptions) -> None:
        self.options = options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and repr(self.options) == repr(other.options)

    def __hash__(self) -> int:
        return hash(repr(self.options))


@lru_cache(maxsize=MOST_MODELS)
def _load_cached(key: _Key) -> LoadedModels:
    return load(key.options, select(key.options))
