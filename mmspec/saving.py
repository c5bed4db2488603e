"""Save and load accelerated models: the recipe, its parts and its drafter, not the target.

folder/mmspec.json    recipe, modality, parts and the name of the target
folder/drafter/       the draft model, if the recipe takes one; safetensors
folder/files/         copies of the files that parts name: a judge, a stop head, a datastore
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mmspec import zoo
from mmspec.errors import parse_json, split_parameters
from mmspec.models.folder import read_json
from mmspec.recipe import Recipe

if TYPE_CHECKING:
    from mmspec.accelerated import Accelerated

FILE = "mmspec.json"
DRAFTER = "drafter"  # the only folder that a file may name
FILES = "files"  # the folder of copied files
OF_MODEL = ("config.json", "tokenizer_config.json")  # in folders that are named and not copied
OF_TARGET = (
    "processor",
    "codec",
    "codes",
    "actions",
)  # parts that belong to the target; never saved


def save(fast: Accelerated, folder: Path) -> None:
    """Write what `restore` reads, atomically. Raises ValueError for parts that cannot be saved."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give save_pretrained a folder")
    recipe, parts = fast.recipe, _serialise_parts(fast.recipe, fast.saved_parts)
    name = fast.session.name or None
    content = {
        "recipe": recipe.name,
        "modality": fast.modality.name,
        "target": name and (zoo.name_of(name) or name),
        "parts": parts,
        "drafter": DRAFTER if recipe.takes_drafter else None,
        "files": {key: f"{key}{one.suffix}" for key, one in fast.files.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".mmspec-", dir=folder) as scratch:  # existing files stay valid
        new = Path(scratch)
        fast.session.save(new / DRAFTER)
        _copy_files(fast.files, new / FILES)
        (new / FILE).write_text(json.dumps(content, indent=2) + "\n")
        for name in (DRAFTER, FILES):
            if (folder / name).exists():
                (folder / name).rename(new / f"old-{name}")
            if (new / name).exists():
                (new / name).rename(folder / name)
        (new / FILE).replace(folder / FILE)


def restore(folder: Path, model: Any) -> dict[str, Any]:
    """Read the arguments of `accelerate` that `save` wrote.

    Raises ValueError if the folder holds none, if the target is unknown, and for a file that
    points outside its folder.
    """
    file = folder / FILE
    if not file.exists():
        raise ValueError(f"{folder} has no {FILE}; give a folder that save_pretrained wrote")
    content = read_json(file)
    model = content["target"] if model is None else model
    if not model:
        raise ValueError(f"{file} names no target model; pass model=")
    named = content["drafter"]
    if named not in (None, DRAFTER):
        raise ValueError(
            f"{file} names the drafter {named!r}, which is not the folder {DRAFTER!r} beside it; "
            "save it again with save_pretrained"
        )
    parts = dict(content["parts"])
    for key, name in content.get("files", {}).items():
        if Path(name).name != name:
            raise ValueError(
                f"{file} names the file {name!r}, which is not one of the folder {FILES!r} beside "
                "it; save it again with save_pretrained"
            )
        _put_back(parts, key, folder / FILES / name)
    return {
        "model": model,
        "recipe": content["recipe"],
        "modality": content.get("modality"),
        "drafter": None if named is None else folder / DRAFTER,
        **parts,
    }


def split_files(
    given: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Parts without the files that they name, and these as absolute paths.

    `options` are those of the recipe and their defaults. The keys of files are "judge", for an
    option, or "length.head", for length="specdec-pp:head=FILE".
    """
    parts, files = dict(given), dict[str, Path]()
    for name, value in given.items():
        if name in OF_TARGET or not isinstance(value, str | Path):
            continue
        if isinstance(value, Path) or (options.get(name, "") is None and _exists(value)):
            parts[name] = str(Path(value).absolute())
            if not any((Path(value) / one).exists() for one in OF_MODEL):
                files[name] = Path(parts.pop(name))
            continue
        head, _, rest = value.partition(":")
        pairs = {key: one for key, _, one in (p.partition("=") for p in split_parameters(rest))}
        found = {key: Path(one).absolute() for key, one in pairs.items() if _exists(one)}
        if found:
            kept = [f"{key}={one}" for key, one in pairs.items() if key not in found]
            parts[name] = f"{head}:{','.join(kept)}"
            files |= {f"{name}.{key}": path for key, path in found.items()}
    return parts, files


def _exists(text: str) -> bool:
    """Whether a text is no number and the path of something that exists."""
    try:
        parse_json(text)
    except ValueError:
        return bool(text) and Path(text).exists()
    return False


def _copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy each under its key. Raises ValueError for one that is not there any more."""
    for key, source in files.items():
        if not source.exists():
            raise ValueError(
                f"{key} was read from {source}, which is no longer there, so it cannot be saved; "
                "call accelerate() with its new path first"
            )
        folder.mkdir(exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, folder / f"{key}{source.suffix}")


def _put_back(parts: dict[str, Any], key: str, path: Path) -> None:
    """Name a file again in the part that it was taken from."""
    name, _, parameter = key.partition(".")
    if not parameter:
        parts[name] = str(path)
        return
    before = parts[name] if parts[name].endswith(":") else f"{parts[name]},"
    parts[name] = f"{before}{parameter}={path}"


def _serialise_parts(recipe: Recipe, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parts given with a recipe as JSON values, without those of the target."""
    if not recipe.name:
        raise ValueError(
            "only a recipe from mmspec.recipes can be saved; this one was made by hand"
        )
    kept = {name: value for name, value in given.items() if name not in OF_TARGET}
    objects = [name for name, value in kept.items() if not _is_plain(value)]
    if objects:
        raise ValueError(
            f"{', '.join(objects)} was given as an object and cannot be saved; give a number, a "
            'name, or a file, as in length="specdec-pp:head=stop.safetensors"'
        )
    return kept


def _is_plain(value: Any) -> bool:
    """Whether JSON can represent it."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | int | float | bool) or value is None
