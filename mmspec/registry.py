"""The registry of modalities, and which of them a model belongs to.

Modalities are discovered: every folder of `mmspec.modalities` but the shared one has a `MODALITY`,
or `MODALITIES` where it has several, and other packages register theirs as entry points of the
group "mmspec.modalities". Imports no torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from mmspec.errors import first_line, nearest_name
from mmspec.modality import Formatting, Measures, Modality, Plug, Source, Survey, TrainingData
from mmspec.models.folder import read_json

GROUP = "mmspec.modalities"
ZOO = "zoo:"
SHARED = "common"  # the folder of what modalities share


@lru_cache(maxsize=1)
def modalities() -> Mapping[str, Modality]:
    """All modalities by name. Raises ValueError where two share a name."""
    shelf = import_module("mmspec.modalities")
    folders = [one.name for one in pkgutil.iter_modules(shelf.__path__) if one.ispkg]
    folders.remove(SHARED)
    found = [
        one for name in sorted(folders) for one in _read_modalities(f"mmspec.modalities.{name}")
    ]
    found += [_load_entry_point(point) for point in entry_points(group=GROUP)]
    named: dict[str, Modality] = {}
    for one in found:
        if one.name in named:
            raise ValueError(f"there are two modalities called {one.name!r}; rename one of them")
        named[one.name] = one
    return named


def _load_entry_point(point: EntryPoint) -> Modality:
    """Load the modality of another package. Raises ValueError where it cannot be used."""
    where = f"the entry point {point.name} = {point.value} of {GROUP}"
    mend = "fix or uninstall the package that defines it"
    try:
        offered = point.load()
    except Exception as error:
        raise ValueError(f"{where} cannot be loaded ({first_line(error)}); {mend}") from error
    if not isinstance(offered, Modality):
        kind = type(offered).__name__
        raise ValueError(f"{where} is a {kind}, not a Modality; {mend}")
    return offered


def _read_modalities(package: str) -> tuple[Modality, ...]:
    folder = vars(import_module(package))
    return folder["MODALITIES"] if "MODALITIES" in folder else (folder["MODALITY"],)


def get(name: str) -> Modality:
    """The modality of that name. Raises ValueError listing the known ones."""
    if not isinstance(name, str) or name not in modalities():
        known = ", ".join(modalities())
        raise ValueError(f"modality {name!r} is not known; choose one of {known}")
    return modalities()[name]


def plug(modality: Modality) -> Plug:
    """Import the implementation of a modality."""
    return cast(Plug, import_module(f"{modality.package}.plug"))


def formatting(modality: Modality) -> Formatting:
    """Import what commands use of a modality."""
    return cast(Formatting, import_module(f"{modality.package}.formatting"))


def measures(modality: Modality) -> Measures:
    """Import the benchmarks of a modality."""
    return cast(Measures, import_module(f"{modality.package}.measures"))


def chat_model(modality: Modality, source: str, model: Any, **options: Any) -> Any:
    """What turns conversations into the inputs of a model; None for one that takes none.

    `source` is what the model was loaded from, where its processor is; `options` are those of its
    loading.
    """
    if find_spec(f"{modality.package}.serving") is None:
        return None
    return import_module(f"{modality.package}.serving").chat_model(source, model, **options)


def tracing(modality: Modality) -> Any:
    """Import what a modality shows of its outputs in a trace; None where that is text alone.

    Its `depict(session, output, trace)` returns plain data of views, by name (docs/trace.md).
    `find_processor(formatter)` returns what decodes tokens to text; None where they are none.
    """
    packages = (modality.package, modality.package.rpartition(".")[0])  # or of several modalities
    homes = (f"{package}.tracing" for package in packages)
    return next((import_module(home) for home in homes if find_spec(home) is not None), None)


def training_data(modality: Modality) -> TrainingData:
    """Import the training data of a modality. Raises ValueError where it has none."""
    if modality.training_data is None:
        able = [one.name for one in modalities().values() if one.training_data is not None]
        raise ValueError(
            f"drafters for models of modality {modality.name} cannot be trained from files, only "
            f"those for {', '.join(able)}; train a head from Python with "
            "mmspec.training.trainable.train_head"
        )
    return cast(TrainingData, import_module(modality.training_data))


def surveys(modality: str | None = None) -> list[Survey]:
    """The modules that measure every class of a library, of all modalities or of one.

    Raises ValueError for a modality without such a module.
    """
    able = {name: one.survey for name, one in modalities().items() if one.survey is not None}
    if modality is not None and get(modality).name not in able:
        raise ValueError(
            f"--all has no classes to measure for modality {modality}; give one of "
            f"{', '.join(sorted(able))}, or leave --modality out"
        )
    named = [one for name, one in able.items() if modality in (None, name)]
    return [cast(Survey, import_module(name)) for name in named]


def find_modality(given: Any, name: str | None = None) -> Modality:
    """Find the modality of a model, a folder or a name; `name` selects one.

    Raises ValueError for a source that belongs to none, and for a bundled checkpoint of another.
    """
    source = describe(given)
    if name is not None:
        owner = get(name)
        if source.checkpoint is not None and not _owns(owner, source):
            own = find_modality(given).name
            raise ValueError(f"{given} is of modality {own}, not {name}; leave the modality out")
        return _check_supported(owner, source)
    owners = [one for one in modalities().values() if _owns(one, source)]
    owners.sort(key=lambda one: one.is_general)
    if not owners:
        what = given if isinstance(given, str | Path) else type(given).__name__
        check_unwrapped(given)
        raise ValueError(
            f"{what} belongs to no modality ({', '.join(modalities())}); give a model of "
            "transformers or a pipeline of diffusers, its folder, or zoo:NAME"
        )
    return _check_supported(owners[0], source)


def _check_supported(owner: Modality, source: Source) -> Modality:
    """The modality itself. Raises ValueError for a model that it cannot accelerate."""
    why = owner.unsupported_models.get(source.model_type or "")
    if why is not None:
        what = source.given if isinstance(source.given, str | Path) else type(source.given).__name__
        raise ValueError(
            f"{what} ({source.model_type}) is not supported: {why}; use model.generate()"
        )
    return owner


def check_unwrapped(given: Any) -> None:
    """Refuse a wrapper around a model, such as `DataParallel`. Raises ValueError."""
    source = describe(given)
    if any(_owns(one, source) for one in modalities().values()):
        return
    inner = _find_wrapped(given, "model")
    if inner is not None:
        raise ValueError(
            f"{type(given).__name__} is a wrapper that cannot be read itself; give the model that "
            f"it holds: {inner}"
        )


def _find_wrapped(given: Any, path: str) -> str | None:
    """The path of a model inside a module; None where it has none."""
    held = vars(given).get("_modules", {}) if hasattr(given, "__dict__") else {}
    for name, part in held.items():
        if any(_owns(one, describe(part)) for one in modalities().values()):
            return f"{path}.{name}"
        if (found := _find_wrapped(part, f"{path}.{name}")) is not None:
            return found
    return None


def _owns(modality: Modality, source: Source) -> bool:
    """Whether a source belongs to a modality; a bundled checkpoint to the one that lists it."""
    if source.checkpoint is not None:
        return source.checkpoint in {entry.name for entry in modality.zoo}
    return modality.owns(source)


def describe(given: Any) -> Source:
    """Describe a model without reading weights."""
    if isinstance(given, str) and given.startswith(ZOO):
        return Source(given, checkpoint=checkpoint(given))
    if isinstance(given, str | Path):
        return _describe_folder(given, Path(given))
    known = vars(given) if hasattr(given, "__dict__") else {}
    if "_orig_mod" in known.get("_modules", {}):  # torch.compile keeps the model itself there
        return replace(describe(known["_modules"]["_orig_mod"]), given=given)
    config = known.get("config")
    classes = tuple(base.__name__ for base in type(given).__mro__)
    return Source(given, vars(type(config)).get("model_type"), classes)


def _describe_folder(given: str | Path, folder: Path) -> Source:
    """Describe a folder by its configuration; nothing is known of a hub name."""
    for name, kind, classes in (
        ("model_index.json", "model_type", "_class_name"),
        ("config.json", "model_type", "architectures"),
    ):
        if (folder / name).is_file():
            content = read_json(folder / name)
            found = content.get(classes) or content.get("_class_name") or ()
            names = (found,) if isinstance(found, str) else tuple(found)
            bases = ("DiffusionPipeline",) if name == "model_index.json" else ()
            return Source(given, content.get(kind), (*names, *bases))
    return Source(given)


ALIASES = {"vlm": "llava"}  # short names of checkpoints


def checkpoint(name: str) -> str:
    """The full name of a bundled checkpoint. Raises ValueError listing the known ones."""
    if isinstance(name, str):
        name = name.removeprefix(ZOO)
        name = ALIASES.get(name, name)
    known = [entry.name for one in modalities().values() for entry in one.zoo]
    if name not in known:
        near = nearest_name(str(name), known)
        hint = f"did you mean {near!r}?" if near else f"choose one of: {', '.join(known)};"
        raise ValueError(f"{name!r} is not in the zoo; {hint} `mmspec zoo list` describes them")
    return name
