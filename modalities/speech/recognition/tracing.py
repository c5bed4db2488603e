"""What a trace of a recogniser shows beside its text."""

from __future__ import annotations

from typing import Any


def find_processor(formatter: Any) -> Any:
    """What decodes its tokens."""
    return formatter.processor


def depict(session: Any, output: Any, trace: Any) -> dict[str, Any]:
    """No further views."""
    return {}
