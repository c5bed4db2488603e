"""Old names of public modules lead to the new ones for one version, with a warning."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from mmspec import _renamed


@pytest.mark.parametrize("old", _renamed.MODULES)
def test_an_old_module_warns_and_leads_to_the_new_one(old: str) -> None:
    new, names = _renamed.MODULES[old]
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is now {new}"):
        module = import_module(old)
    for name, own in names.items():
        home, _, attribute = own.rpartition(":")
        assert getattr(module, name) is getattr(import_module(home or new), attribute)
    public = [name for name in vars(import_module(new)) if not name.startswith("_")]
    assert all(getattr(module, name) is getattr(import_module(new), name) for name in public)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("mmspec.formats", "converted", "convert"),
        ("mmspec.formats", "exported", "export"),
        ("mmspec.compressors", "named", "parse_compressor"),
        ("mmspec.training.trainable", "learn", "train_head"),
        ("mmspec.training.heads", "Lesson", "TrainingExample"),
        ("mmspec.modalities.speech.spectrogram", "spectrogram", "draw_spectrogram"),
        ("mmspec.modalities.vlm.clips", "shown", "processor_arguments"),
    ],
)
def test_an_old_attribute_warns_and_leads_to_the_new_one(module: str, old: str, new: str) -> None:
    found = import_module(module)
    with pytest.warns(FutureWarning, match=f"{module}.{old} is now {module}.{new}"):
        assert getattr(found, old) is getattr(found, new)


@pytest.mark.exhaustive
def test_a_program_of_the_version_before_runs() -> None:
    code = (
        "from mmspec.laws.categorical import Categorical; from mmspec.laws.law import Law; "
        "from mmspec.drafters.growth import Chain; from mmspec.drafters.length import Fixed; "
        "import mmspec.laws.sampling, torch; "
        "assert Law.__name__ == 'Distribution'; Chain(Fixed(4)); Categorical(torch.zeros(3))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FutureWarning: mmspec.laws.categorical is now mmspec.distributions" in done.stderr


def test_questions_of_inspect_do_not_read_the_new_module() -> None:
    """`inspect.getmodule` asks every loaded module for `__file__`, amid imports of torch, too."""
    sys.modules.pop("mmspec.laws.law", None)
    with pytest.warns(FutureWarning):
        module = import_module("mmspec.laws.law")
    assert not hasattr(module, "__file__")
