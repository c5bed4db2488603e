"""The command line: `mmspec generate | recipes | show | doctor | bench | certify | zoo`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. An error is one line, unless MMSPEC_DEBUG=1."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from mmspec.cli.app import app
    from mmspec.cli.output import complain

    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except Exception as error:
        if os.environ.get("MMSPEC_DEBUG") == "1":
            raise
        line = _line(error)
        if line:  # without a command the help was printed
            complain(line)
        return int(getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0


def _line(error: Exception) -> str:
    """What happened, in one line."""
    usage = getattr(error, "format_message", None)  # a wrong option or argument
    if usage is not None:
        return " ".join(usage().split())
    message = " ".join(str(error).split())
    if isinstance(error, ValueError | TypeError | OSError):
        return message or type(error).__name__
    return f"{type(error).__name__}: {message} (MMSPEC_DEBUG=1 shows where)"


if __name__ == "__main__":
    sys.exit(main())
