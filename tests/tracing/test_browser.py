"""Pages of traces in a headless Chromium: they open, answer to slider and keys, and load nothing.

Needs `pip install mmspec[browser]` and a Chromium (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.modalities.speech.frames import tiny_models
from mmspec.tracing.page import make_frame, make_page, write_page
from mmspec.zoo import language
from tests.tracing.records import make_header, make_rounds

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
STEP_MS = 200  # that a step of the slider may take
CONTRAST = 4.5  # of text, WCAG AA
STATIC = {"kept"}  # views that do not depend on the round
MEASURE = """async (steps) => {
  const slider = document.getElementById("slider"), spent = [];
  for (let step = 0; step < steps; step++) {
    const start = performance.now();
    slider.value = Math.floor(step * slider.max / (steps - 1));
    slider.dispatchEvent(new Event("input"));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    spent.push(performance.now() - start);
  }
  return spent;
}"""
LUMINANCE = """([selector, dark]) => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255);
    const [r, g, b] = parts.map((one) =>
      one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  const back = getComputedStyle(element.closest(".panel") || document.body).backgroundColor;
  const pair = [light(getComputedStyle(element).color), light(back)].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; at the end nothing may have failed, and nothing may have been requested."""
    pages, troubles = [], []

    def open_page(file: Path, scheme: str = "light", address: str = "") -> Any:
        page = browser.new_page(viewport={"width": 1100, "height": 800}, color_scheme=scheme)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda line: troubles.append(f"{line.type}: {line.text}"))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on("request", lambda one: troubles.append(one.url) if leaves(one.url, file) else None)
        pages.append(page)
        page.goto(file.as_uri() + address)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not troubles


def leaves(url: str, file: Path) -> bool:
    return url.partition("#")[0] != file.as_uri() and not url.startswith("data:")


def trace_text(recipe: str, **parts: Any) -> mmspec.Trace:
    model, small, processor = zoo.load("llava"), zoo.load("llava-drafter"), zoo.processor("llava")
    examples = language.examples(2, "held-out", 0, kind="caption")
    texts = [language.format_prompt(processor, one.prompt) for one in examples]
    images = [one.image for one in examples]
    inputs = dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))
    fast = mmspec.accelerate(model, recipe, drafter=small, **parts)
    trace, plain = mmspec.Trace(processor), mmspec.Trace()
    fast.generate(**inputs, max_new_tokens=40, trace=trace)
    mmspec.accelerate(model, "plain").generate(**inputs, max_new_tokens=40, trace=plain)
    trace.race(plain)
    return trace


def trace_picture() -> mmspec.Trace:
    trace = mmspec.Trace()
    fast = mmspec.accelerate("zoo:image", processor=zoo.processor("image"))
    fast.generate_images(prompt="a large red circle", seed=0, trace=trace)
    return trace


def trace_steps() -> mmspec.Trace:
    trace = mmspec.Trace()
    fast = mmspec.accelerate("zoo:diffusion", "asd")
    fast("a large red circle", num_inference_steps=20, seed=0, trace=trace)
    return trace


def trace_forecasts() -> mmspec.Trace:
    trace = mmspec.Trace()
    fast = mmspec.accelerate("zoo:diffusion", "speca", base=0.5, floor=0.25)
    fast(["a large red circle", "a small blue star"], num_inference_steps=20, seed=0, trace=trace)
    return trace


def trace_frames(name: str) -> mmspec.Trace:
    """Two texts of different length to a tiny model of frames of several codebooks."""
    model, small = (tiny_models.MODELS[name](seed, layers) for seed, layers in ((0, 2), (1, 1)))
    ids = torch.tensor([[0, 0, 4, 5], [6, 7, 8, 9]])
    trace, how = mmspec.Trace(), {"temperature": 1.0, "top_k": 0, "seed": 5, "max_new_tokens": 20}
    fast = mmspec.accelerate(model, "frame-coupled", drafter=small)
    fast.synthesize(input_ids=ids, attention_mask=(ids > 0).long(), **how, trace=trace)
    return trace


def trace_sound() -> mmspec.Trace:
    trace = mmspec.Trace()
    fast = mmspec.accelerate("zoo:codec-lm", "coupled", drafter="zoo:codec-lm-drafter")
    fast.synthesize("a large red circle", seed=0, trace=trace)
    return trace


def trace_actions() -> mmspec.Trace:
    traces = []
    for recipe in ("hold-last-tolerance", "plain"):
        fast = mmspec.accelerate("zoo:vla", recipe, processor=zoo.processor("vla"))
        traces.append(mmspec.Trace())
        fast.rollout("table", steps=6, seed=3, trace=traces[-1])
    traces[0].race(traces[1])
    return traces[0]


TEXT = {"text", "tree", "race", "acceptance", "times"}
TRACES: dict[str, tuple[Callable[[], mmspec.Trace], set[str]]] = {
    "chain": (lambda: trace_text("coupled"), TEXT),
    "tree": (lambda: trace_text("dynamic-tree", compressor="attn-topk:keep=0.3"), TEXT | {"kept"}),
    "picture": (trace_picture, TEXT | {"picture"}),
    "steps": (trace_steps, TEXT - {"text", "race"} | {"denoising"}),
    "forecasts": (trace_forecasts, TEXT - {"text", "race"} | {"denoising"}),
    "sound": (trace_sound, TEXT | {"sound"}),
    "delayed frames": (partial(trace_frames, "delay"), TEXT | {"sound"}),
    "frames by depth": (partial(trace_frames, "depth"), TEXT | {"sound"}),
    "actions": (trace_actions, TEXT | {"actions"}),
}


def wait_until(page: Any, is_so: Callable[[], bool]) -> None:
    """Poll from here: the page allows no script from outside, playwright's own included."""
    for _ in range(100):
        if is_so():
            return
        page.wait_for_timeout(50)
    raise AssertionError("not within 5 seconds")


@pytest.mark.parametrize("name", TRACES)
def test_every_view_opens_and_follows_the_slider(
    show: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    make, views = TRACES[name]
    page = show(make().save(tmp_path / "run.html"))
    sections = page.locator("main > section")
    assert set(sections.evaluate_all("all => all.map(one => one.id)")) == views
    last = int(page.locator("#slider").get_attribute("max"))
    assert last > 3
    for view in views:
        section = page.locator(f"#{view}")
        assert section.is_visible()
        assert section.bounding_box()["height"] > 60
        seen = set()
        for at in (0, 1, last // 2, last):
            page.locator("#slider").fill(str(at))
            seen.add(section.inner_html())
        assert (len(seen) == 1) == (view in STATIC), view
    assert page.evaluate("document.documentElement.scrollWidth") <= 1100
    assert page.locator("img:not([alt])").count() == 0
    unnamed = "button:not([aria-label]):empty, svg[role=img]:not([aria-label])"
    assert page.locator(unnamed).count() == 0


def test_keys_and_buttons_move_the_slider(show: Callable[..., Any], tmp_path: Path) -> None:
    write_page(tmp_path / "run.html", make_header(30), make_rounds(30))
    page = show(tmp_path / "run.html")

    def at() -> int:
        return int(page.locator("#slider").input_value())

    assert at() == 29
    presses = {"Home": 0, "ArrowRight": 1, "PageDown": 11, "PageUp": 1, "ArrowLeft": 0, "End": 29}
    for key, place in presses.items():
        page.keyboard.press(key)
        assert at() == place, key
        assert f"Round {place} of 29" in page.locator("#now").inner_text()
        assert f"Round {place} of 29" in page.locator("#slider").get_attribute("aria-valuetext")
    for button, place in (("first", 0), ("next", 1), ("back", 0), ("last", 29)):
        page.locator(f"#{button}").click()
        assert at() == place
    page.locator("#slider").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert at() == 1
    page.locator("#speed").select_option("x1")
    page.locator("h1").click()
    page.keyboard.press("Space")
    wait_until(page, lambda: at() == 29)
    wait_until(page, lambda: page.locator("#play").inner_text() == "Play")
    page.locator("#speed").select_option("4")
    page.locator("#play").click()
    assert page.locator("#play").get_attribute("aria-pressed") == "true"
    wait_until(page, lambda: 1 < at() < 29)
    page.locator("#play").click()
    stopped = at()
    page.wait_for_timeout(600)
    assert at() == stopped


def test_refused_words_are_shown_on_hover_and_on_focus(
    show: Callable[..., Any], tmp_path: Path
) -> None:
    write_page(tmp_path / "run.html", make_header(9), make_rounds(9))
    page = show(tmp_path / "run.html")
    page.locator("#slider").fill("2")
    word, tip = page.locator("#text .word.c.now").first, page.locator("#tip")
    assert tip.is_hidden()
    word.hover()
    assert tip.locator("del").count() > 0
    assert "p 0.5, q 0.25, rank" in tip.inner_text()
    page.locator("h1").hover()
    assert tip.is_hidden()
    word.focus()
    assert tip.is_visible()
    assert word.get_attribute("aria-describedby") == "tip"
    page.locator("#inline").check()
    assert page.locator("#text p.words del:visible").count() > 0
    page.locator("#text p.words .word.a").first.click()  # goes to its round
    assert page.locator("#slider").input_value() == "1"
    page.locator("#tree summary").click()
    assert page.locator("#tree tbody tr").count() == 24


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_are_readable_without_colour_and_in_both_schemes(
    show: Callable[..., Any], tmp_path: Path, scheme: str
) -> None:
    write_page(tmp_path / "run.html", make_header(9), make_rounds(9))
    page = show(tmp_path / "run.html", scheme)
    kinds = {}
    for kind in "aco":
        selector = f"#text .legend .word.{kind}"
        assert page.evaluate(LUMINANCE, [selector, scheme]) >= CONTRAST, selector
        style = "one => { const s = getComputedStyle(one);"
        style += " return s.borderBottomStyle + s.borderBottomWidth + s.fontWeight; }"
        kinds[kind] = page.locator(selector).evaluate(style)
    assert len(set(kinds.values())) == 3
    for selector in ("#text del", ".hint", "#now", "#asked"):
        assert page.evaluate(LUMINANCE, [selector, scheme]) >= CONTRAST, selector
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert dark == (scheme == "dark")


@pytest.mark.parametrize(("rounds", "nodes"), [(400, 60), (40_000, 6)], ids=["1,000", "100,000"])
def test_a_step_of_a_long_trace_is_quick(
    show: Callable[..., Any], tmp_path: Path, rounds: int, nodes: int
) -> None:
    write_page(tmp_path / "run.html", make_header(rounds), make_rounds(rounds, nodes))
    page = show(tmp_path / "run.html")
    assert (page.locator(".note").count() == 1) == (rounds == 40_000)
    passes = [page.evaluate(MEASURE, 40) for _ in range(3)]
    spent = [min(times) for times in zip(*passes, strict=True)]  # other work slows some of them
    assert sorted(spent)[len(spent) * 9 // 10] < STEP_MS, spent
    assert max(spent) < 2 * STEP_MS, spent


def test_markup_in_a_trace_is_shown_as_text(show: Callable[..., Any], tmp_path: Path) -> None:
    evil = "</script><script>window.hacked = alert(1)</script><img src=x onerror='alert(2)'>"
    rounds = make_rounds(3)
    for row in (row for one in rounds for row in one["rows"]):
        row["text"] = [evil] * len(row["text"])
        row["draft_text"] = [evil] * len(row["draft_text"])
    header = make_header(3, prompt=[evil], model=evil, settings={"a": evil}, notes=[evil])
    write_page(tmp_path / "run.html", header, rounds)
    page = show(tmp_path / "run.html")
    assert page.locator("#asked").inner_text() == f"Prompt: {evil}"
    assert page.locator(".note").inner_text() == evil
    assert evil in page.locator("#text .words").inner_text()
    page.locator("#text .word.now").last.hover()
    assert page.evaluate("window.hacked === undefined")
    assert page.locator("img").count() == 0


def test_a_trace_without_rounds_opens(show: Callable[..., Any], tmp_path: Path) -> None:
    write_page(tmp_path / "run.html", make_header(0, 0), [])
    page = show(tmp_path / "run.html")
    assert "no rounds" in page.locator(".note").inner_text()
    assert page.locator("#play").is_disabled()
    page.keyboard.press("ArrowRight")


def test_a_frame_in_another_page_holds_the_trace(show: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "notebook.html"
    frame = make_frame(make_page(make_header(9), make_rounds(9)))
    file.write_text(f"<!doctype html><p>a cell</p>{frame}", encoding="utf-8")
    inside = show(file).frame_locator("iframe")
    inside.locator("#slider").fill("2")
    assert "Round 2 of 8" in inside.locator("#now").inner_text()
    assert inside.locator("#text .word").count() > 4


def test_an_example_within_a_page_plays_by_itself(show: Callable[..., Any], tmp_path: Path) -> None:
    write_page(tmp_path / "run.html", make_header(9), make_rounds(9))
    page = show(tmp_path / "run.html", address="#autoplay")
    assert page.locator("#figures").is_hidden()
    wait_until(page, lambda: int(page.locator("#slider").input_value()) >= 2)
    page.locator("#play").click()
    assert page.locator("#play").inner_text() == "Play"
