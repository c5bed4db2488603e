"""What reads a toy, as its modality says."""

from __future__ import annotations

from typing import Any

import mmspec
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.reader import Reader


def backbone(model: Any) -> Reader:
    """The reader that `accelerate` binds."""
    found: Reader = mmspec.accelerate(model, "plain").session.bound.backbone
    return found


def family(model: Any) -> Family:
    """What is described of its family."""
    return backbone(model).family
