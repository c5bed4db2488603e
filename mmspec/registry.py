"""Which modalities there are, and which of them a model belongs to.

They are found, not listed: every folder of `mmspec.modalities` has a `MODALITY`, or `MODALITIES`
where it holds several, and so has every entry point of other packages in the group
"mmspec.modalities". Nothing here imports torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from mmspec.errors import first_line
from mmspec.modality import Formatting, Measures, Modality, Plug, Source, Survey, TrainingData
from mmspec.models.folder import configuration

GROUP = "mmspec.modalities"
ZOO = "zoo:"
SHARED = "common"  # what modalities share, in a folder among theirs


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
    """What another package offers. Raises ValueError naming what cannot be used."""
    where = f"the entry point {point.name} = {point.value} of {GROUP}"
    mend = "mend the package that has it, or uninstall that"
    try:
        offered = point.load()
    except Exception as error:
        raise ValueError(f"{where} cannot be loaded ({first_line(error)}); {mend}") from error
    if not isinstance(offered, Modality):
        kind = type(offered).__name__
        raise ValueError(f"{where} leads to a {kind}, and not to a Modality; {mend}")
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
    """The heavy half, imported now."""
    return cast(Plug, import_module(f"{modality.package}.plug"))


def formatting(modality: Modality) -> Formatting:
    """How its models are asked by people, imported now."""
    return cast(Formatting, import_module(f"{modality.package}.formatting"))


def measures(modality: Modality) -> Measures:
    """How a modality is measured, imported now."""
    return cast(Measures, import_module(f"{modality.package}.measures"))


def training_data(modality: Modality) -> TrainingData:
    """How its models are asked what training data hold. Raises ValueError where they are not."""
    if modality.training_data is None:
        able = [one.name for one in modalities().values() if one.training_data is not None]
        raise ValueError(
            f"models of modality {modality.name} cannot be taught from files yet, only those of "
            f"{', '.join(able)}; train a head from Python with mmspec.training.trainable.learn"
        )
    return cast(TrainingData, import_module(modality.training_data))


def surveys() -> list[Survey]:
    """What measures every class of a library, imported now."""
    named = [one.survey for one in modalities().values() if one.survey is not None]
    return [cast(Survey, import_module(name)) for name in named]


def find_modality(given: Any, name: str | None = None) -> Modality:
    """The modality that a model, a folder or a name belongs to; `name` decides where it is given.

    Raises ValueError for what nobody owns, and for a checkpoint of the zoo that is another's.
    """
    source = describe(given)
    if name is not None:
        owner = get(name)
        if source.checkpoint is not None and not _owns(owner, source):
            whose = find_modality(given).name
            raise ValueError(f"{given} is of modality {whose}, not {name}; leave the modality out")
        return owner
    owners = [one for one in modalities().values() if _owns(one, source)]
    owners.sort(key=lambda one: one.is_general)
    if not owners:
        what = given if isinstance(given, str | Path) else type(given).__name__
        check_unwrapped(given)
        raise ValueError(
            f"{what} belongs to no modality ({', '.join(modalities())}); give a model of "
            "transformers or a pipeline of diffusers, its folder, or zoo:NAME"
        )
    return owners[0]


def check_unwrapped(given: Any) -> None:
    """Refuse what nobody owns and what holds a model that somebody does. Raises ValueError.

    As `DataParallel` and adapters around a model are, which read nothing by themselves.
    """
    source = describe(given)
    if any(_owns(one, source) for one in modalities().values()):
        return
    inner = _wrapped(given, "model")
    if inner is not None:
        raise ValueError(
            f"{type(given).__name__} is a wrapper that cannot be read itself; give the model that "
            f"it holds: {inner}"
        )


def _wrapped(given: Any, path: str) -> str | None:
    """Where a module holds a model that somebody owns; None where it holds none."""
    held = vars(given).get("_modules", {}) if hasattr(given, "__dict__") else {}
    for name, part in held.items():
        if any(_owns(one, describe(part)) for one in modalities().values()):
            return f"{path}.{name}"
        if (found := _wrapped(part, f"{path}.{name}")) is not None:
            return found
    return None


def _owns(modality: Modality, source: Source) -> bool:
    """A checkpoint of the zoo belongs to whoever lists it."""
    if source.checkpoint is not None:
        return source.checkpoint in {entry.name for entry in modality.zoo}
    return modality.owns(source)


def describe(given: Any) -> Source:
    """What can be known of a model without reading weights."""
    if isinstance(given, str) and given.startswith(ZOO):
        return Source(given, checkpoint=checkpoint(given))
    if isinstance(given, str | Path):
        return _described(given, Path(given))
    known = vars(given) if hasattr(given, "__dict__") else {}
    if "_orig_mod" in known.get("_modules", {}):  # torch.compile keeps the model itself there
        return replace(describe(known["_modules"]["_orig_mod"]), given=given)
    config = known.get("config")
    classes = tuple(base.__name__ for base in type(given).__mro__)
    return Source(given, vars(type(config)).get("model_type"), classes)


def _described(given: str | Path, folder: Path) -> Source:
    """A folder by its configuration; of a name on a hub nothing is known."""
    for name, kind, classes in (
        ("model_index.json", "model_type", "_class_name"),
        ("config.json", "model_type", "architectures"),
    ):
        if (folder / name).is_file():
            content = configuration(folder / name)
            found = content.get(classes) or content.get("_class_name") or ()
            names = (found,) if isinstance(found, str) else tuple(found)
            bases = ("DiffusionPipeline",) if name == "model_index.json" else ()
            return Source(given, content.get(kind), (*names, *bases))
    return Source(given)


ALIASES = {"vlm": "llava"}  # what a newcomer may call a checkpoint


def checkpoint(name: str) -> str:
    """The full name of a checkpoint of the zoo, `zoo:` or not. Raises ValueError listing them."""
    if isinstance(name, str):
        name = name.removeprefix(ZOO)
        name = ALIASES.get(name, name)
    known = [entry.name for one in modalities().values() for entry in one.zoo]
    if name not in known:
        raise ValueError(
            f"{name!r} is not in the zoo; choose one of: {', '.join([*known, *ALIASES])}"
        )
    return name
