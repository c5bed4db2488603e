"""Command lines that are wrong: options, values, files and models that do not go together."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from mmspec import recipes, registry, zoo
from mmspec.cli import main
from mmspec.cli.options import PARTS, flag, select_settings
from tests.toys.folders import DAMAGES, SPOIL_THE_MODEL
from tests.uses.judging import LIMIT_S, Endless, Judgement, missing, time_limit

Line = tuple[list[str], list[str]]  # what is typed, and what an error has to name one of

TARGETS = {"vlm": "zoo:llava", "image": "zoo:image", "mar": "zoo:mar", "diffusion": "zoo:diffusion"}
PROMPTS = {"vlm": "describe the picture", "image": "a red circle", "mar": "3", "diffusion": "star"}
NUMBERS = ("x", "1.5.5", "", "two", "--", "1e", "0x1", "[1]", "None")
LOW = ("-1", "-999", "0")
COMMANDS = ("generate", "bench", "certify")
BARE = (  # commands without a model, and what is wrong with them
    (["show"], ["Missing argument"]),
    (["show", "copled"], ["copled"]),
    (["show", "coupled", "eagle"], ["eagle"]),
    (["recipes", "--modality", "music"], ["music"]),
    (["recipes", "--markdwon"], ["--markdwon"]),
    (["zoo", "path"], ["Missing argument"]),
    (["zoo", "path", "cat"], ["cat"]),
    (["zoo", "lst"], ["lst"]),
    (["zoo", "train", "cat", "--out", "x"], ["cat"]),
    (["zoo", "train", "llava", "--steps", "0", "--out", "x"], ["--steps"]),
    (["zoo", "train", "llava", "--steps", "1"], ["llava"]),
    (["zoo", "train", "llava", "--out", "FILE"], ["file"]),
    (["train", "phrases", "--pictures", "0"], ["--pictures"]),
    (["train", "phrases", "--model", "zoo:mar"], ["zoo:mar", "mar"]),
    (["train", "phrases", "--longest", "1"], ["--longest"]),
    (["train", "phrases", "--out", "nowhere/at/all"], ["nowhere"]),
    (["train", "songs"], ["songs"]),
    (["bench", "scale"], ["--shape"]),
    (["bench", "scale", "--shape", "gpt-9"], ["gpt-9"]),
    (["bench", "scale", "--shape", "tiny", "--dtype", "int8"], ["int8"]),
    (["bench", "scale", "--shape", "tiny", "--device", "tpu9"], ["tpu9"]),
    (["bench", "scale", "--shape", "tiny", "--acceptance", "2"], ["acceptance", "2"]),
    (["bench", "scale", "--shape", "tiny", "--acceptance", "-1"], ["acceptance", "-1"]),
    (["bench", "scale", "--shape", "tiny", "--context", "0"], ["context", "0"]),
    (["bench", "scale", "--shape", "tiny", "--context", "-4"], ["context", "-4"]),
    (["bench", "scale", "--shape", "tiny", "--length", "0"], ["length"]),
    (["bench", "sweep", "--recipe", "coupled"], ["coupled"]),
    (["bench", "sweep", "--out", "x.txt"], ["x.txt", ".txt"]),
    (["bench", "sweep", "--plot", "x.doc"], ["x.doc", ".doc"]),
    (["bench", "sweep", "--prompts", "0"], ["--prompts"]),
    (["bench", "sweeep"], ["sweeep"]),
    (["doctor"], ["Missing argument"]),
    (["doctor", "zoo:nope"], ["nope"]),
    (["doctor", "./nowhere"], ["nowhere"]),
    (["doctor", "FILE"], ["file"]),
    (["doctor", "zoo:llava", "zoo:image-head"], ["head"]),
    (["doctor", "zoo:mar", "zoo:llava"], ["llava"]),
    (["doctor", "zoo:diffusion", "zoo:mar"], ["mar"]),
    (["doctor", "zoo:llava", "--modality", "music"], ["music"]),
    (["doctor", "zoo:llava", "--modality", "mar"], ["mar", "llava"]),
    (["certify"], ["Missing argument"]),
    (["certify", "nope"], ["nope"]),
    (["certify", "coupled", "--samples", "3"], ["--samples"]),
    (["certify", "coupled", "--modality", "mar"], ["coupled", "mar"]),
    (["certify", "asd", "--model", "zoo:llava"], ["asd"]),
    (["generate"], ["--prompt"]),
    (["generate", "--prompt", "x", "y"], ["y"]),
    (["bogus"], ["bogus"]),
    (["--bogus"], ["--bogus"]),
    (["genrate", "--prompt", "x"], ["genrate"]),
)


def line(rng: Random, root: Path) -> Line:
    """What is typed, and what is wrong with it."""
    makers: Sequence[Callable[[Random, Path], Line]]
    makers = (_bare, _option, _value, _value, _foreign, _recipe, _drafter, _model, _model, _file)
    words, wrong = rng.choice(makers)(rng, root)
    if rng.random() < 0.3 and words[0] in COMMANDS:
        words = [words[0], "--json", *words[1:]]
    return [word.replace("FILE", str(root / "file")) for word in words], wrong


def _build_command(rng: Random, root: Path, **options: str) -> tuple[list[str], str]:
    """A command that would be right and quick, and its modality."""
    owner = options.get("modality") or rng.choice([*TARGETS])
    command = options.get("command") or rng.choice(COMMANDS[:2])
    words = [command, "--model", options.get("model", TARGETS[owner])]
    words += ["--prompt", PROMPTS[owner]] if command != "certify" else []
    quick = {"generate": ["--no-compare"], "bench": ["--repeats", "1", "--no-peers"]}
    words += quick.get(command, [])
    if command == "generate" and owner != "vlm":
        words += ["--out", str(root / "drawn.png")]
    return words, owner


def _bare(rng: Random, root: Path) -> Line:
    words, wrong = rng.choice(BARE)
    return list(words), list(wrong)


def _option(rng: Random, root: Path) -> Line:
    """An option that there is not, or a value that is missing."""
    words, _ = _build_command(rng, root)
    option = rng.choice(("--modle", "--recpie", "--temprature", "--steps-mpa", "-x", "--no-json"))
    if rng.random() < 0.3:
        return [*words, last := rng.choice(("--recipe", "--seed", "--drafter"))], [last]
    return [*words, option, *rng.choice((["1"], []))], [option, "1"]


def _value(rng: Random, root: Path) -> Line:
    """A setting of the modality, or an option of all, with a value of another kind or range."""
    words, owner = _build_command(rng, root)
    every = select_settings(registry.get(owner), words[0])
    limited_ones = [one for one in every if set(one.metadata) & {"min", "max", "choices"}]
    if rng.random() < 0.5 and limited_ones:
        one = rng.choice(limited_ones)
        name = flag(one.name)
        is_words = one.metadata.get("choices") is not None
        least = one.metadata.get("min", 1)
        low = [value for value in LOW if float(value) < least]
        value = "sideways" if is_words else rng.choice([*low, *NUMBERS])
        return [*words, name, value], [name, one.name]
    name = rng.choice(("--seed", "--threads", "--repeats", "--length", "--tree", "--set"))
    odd = {
        "--threads": LOW,
        "--repeats": LOW,
        "--length": ("long", "-1", "1.5"),
        "--tree": ("wide", "3,0,1", "-1", "2,,1", "1.5"),
        "--set": ("x", "=3", "colour=", "=", "colour=3", "lenght=3"),
    }
    value = rng.choice((*odd.get(name, ()), *(NUMBERS if name in ("--seed", "--threads") else ())))
    return [*words, name, value], [name, name[2:], value.partition("=")[0] or value, "tree", "size"]


def _foreign(rng: Random, root: Path) -> Line:
    """An option of another modality."""
    words, owner = _build_command(rng, root)
    modality = registry.get(owner)
    known = {one.name for one in select_settings(modality, words[0])} | set(modality.parts)
    others = {
        one.name: isinstance(one.default, bool)
        for other in registry.modalities().values()
        for one in select_settings(other, words[0])
    }
    name = rng.choice(sorted({*others, *PARTS} - known))
    return [*words, flag(name), *([] if others.get(name) else ["1"])], [flag(name), name]


def _recipe(rng: Random, root: Path) -> Line:
    """A recipe of another modality, or a misspelt one, or a rule that there is not."""
    words, owner = _build_command(rng, root)
    if rng.random() < 0.2:
        return [*words, "--verifier", "exactly"], ["exactly"]
    own = recipes.names(registry.get(owner).decodes)
    foreign = [name for name in recipes.names() if name not in own]
    name = rng.choice((rng.choice(foreign), f"{rng.choice(own)}x", "", "Coupled"))
    return [*words, "--recipe", name], [repr(name)]


def _drafter(rng: Random, root: Path) -> Line:
    """A draft model that is missing, damaged, of another sort, or not wanted."""
    words, owner = _build_command(rng, root)
    others = [name for name in zoo.names() if zoo.modality(name).name != owner]
    name = rng.choice(SPOIL_THE_MODEL)
    folder = str(root / name)
    small = rng.choice(
        (f"zoo:{rng.choice(others)}", "zoo:nope", "./nowhere", folder, folder, "FILE", "")
    )
    wrong = [small.removeprefix("zoo:") or "''", name, "draft", "file", "head"]
    return [*words, "--drafter", small], wrong


def _model(rng: Random, root: Path) -> Line:
    """A model that is missing, damaged, or not of the modality that is said."""
    name = rng.choice([*DAMAGES])
    model = rng.choice((str(root / name), str(root / name), "zoo:nope", "./nowhere", "FILE", ""))
    if rng.random() < 0.2:
        model = str(root / "empty")
    words, _ = _build_command(rng, root, model=model)
    if rng.random() < 0.2:
        words += ["--modality", rng.choice(("music", "mar", "image", "diffusion"))]
    if rng.random() < 0.3:
        name, model = rng.choice([(one, str(root / one)) for one in SPOIL_THE_MODEL])
        words = ["doctor", model]
    if model and not Path(model).is_dir():
        name = model.removeprefix("zoo:")
    return words, [name, Path(model).name or "''", "modality", "file", "draft"]


def _file(rng: Random, root: Path) -> Line:
    """Files that cannot be read or written."""
    kind = rng.choice(("image", "out", "map"))
    if kind == "image":
        words, _ = _build_command(rng, root, modality="vlm", command="generate")
        picture = rng.choice(("none.png", "FILE", str(root / "empty"), str(root / "cut.png"), ""))
        return [*words, "--image", picture], [Path(picture).name or "no picture", "file", "picture"]
    owner = rng.choice([*TARGETS])
    words, _ = _build_command(rng, root, modality=owner, command="generate")
    words = words[: words.index("--out")] if "--out" in words else words
    odd = ("nowhere/x.png", str(root / "empty"), "x.exe", "picture", "/proc/x/y.png")
    file = rng.choice((*odd, "x.png") if owner == "vlm" else odd)
    if kind == "map":
        return [*words, "--steps-map", file], ["--steps-map", Path(file).name]
    return [*words, "--out", file], ["--out", Path(file).name]


Run = Callable[[Sequence[str]], tuple[int, str, str]]  # exit code, stdout, stderr


def judge_command(words: Sequence[str], wrong: Sequence[str], run: Run) -> Judgement:
    """One line on stderr that says what to do, and an exit code that is not 0."""
    text = f"mmspec {' '.join(repr(word) if not word or ' ' in word else word for word in words)}"
    try:
        code, out, err = run(words)
    except Endless:
        return Judgement(text, "endless", f"stopped after {LIMIT_S} s")
    if "Traceback" in err or "Traceback" in out:
        return Judgement(text, "traceback", err[-2000:])
    if code == 0:
        return Judgement(text, "accepted", out[:200])
    errors = [one.removeprefix("error: ") for one in err.splitlines() if one.startswith("error: ")]
    lacks = "one line" if len(errors) != 1 else missing(errors[0], wrong)
    lacks = "another error" if "MMSPEC_DEBUG=1 shows where" in err else lacks
    return Judgement(text, "no fix" if lacks else "fixable", f"[{lacks}] {err}")


def in_process(words: Sequence[str]) -> tuple[int, str, str]:
    """A command here, with what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), time_limit(LIMIT_S):
        try:
            code = main(list(words))
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()
