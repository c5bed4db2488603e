"""Prompts in a model's own chat template, within limits: the template is code of its folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from jinja2 import Environment, TemplateError

from mmspec.errors import first_line

MAX_SECONDS = 10.0
MAX_BYTES = 2 << 30  # of memory, beyond what the process has
MAX_CHARACTERS = 1 << 22  # of all prompts


def apply_chat_template(processor: Any, turns: Sequence[Any], **options: Any) -> Any:
    """What `processor.apply_chat_template` makes of a conversation, or of several.

    Jinja runs the template in a sandbox that limits neither time nor memory. Raises ValueError for
    a template that fails or exceeds the limits.
    """
    try:
        _refuse_powers(processor.chat_template)
        with _limited_memory(), _limited_time():
            made = processor.apply_chat_template(turns, **options)
        texts = made if isinstance(made, list) else [made]
        if sum(len(text) for text in texts if isinstance(text, str)) > MAX_CHARACTERS:
            raise ValueError(f"it makes more than {MAX_CHARACTERS} characters")
    except Exception as error:  # templates raise anything
        raise ValueError(
            f"the model's chat template cannot be used ({first_line(error)}); correct "
            "chat_template.jinja in its folder, or copy the folder again"
        ) from error
    return made


def _refuse_powers(template: Any) -> None:
    """Refuse `a ** b`, a single step that may take any time; `f(**names)` is another operator."""
    texts = template.values() if isinstance(template, dict) else [template]
    for text in filter(None, texts):
        before = None
        with suppress(TemplateError):  # invalid templates fail when they run
            for _, kind, value in Environment().lex(text):
                if (kind, value) == ("operator", "**") and before not in ("(", ","):
                    raise ValueError("it computes a power")
                before = before if kind == "whitespace" else value


@contextmanager
def _limited_time() -> Iterator[None]:
    """Stop Python code of this thread after `MAX_SECONDS`, by a trace function."""
    end, outer = monotonic() + MAX_SECONDS, sys.gettrace()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if monotonic() > end:
            raise TimeoutError(f"it runs for more than {MAX_SECONDS:g} s")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the process to `MAX_BYTES` more of memory, where the system can (Linux)."""
    try:
        import resource

        with open("/proc/self/statm") as stream:
            used = int(stream.read().split()[5]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([used + MAX_BYTES, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
