"""The command line: `mmspec generate | recipes | show | doctor | bench | certify | train | zoo`."""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. An error is one line, unless MMSPEC_DEBUG=1."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from mmspec.cli.output import format_error, print_error

    try:
        from mmspec.cli.app import commands  # options depend on what is installed

        given = None if arguments is None else list(arguments)
        code = commands()(args=given, standalone_mode=False)
    except KeyboardInterrupt:
        print_error("interrupted; nothing was written")
        return 130
    except Exception as error:
        if os.environ.get("MMSPEC_DEBUG") == "1":
            raise
        message, exit_code = format_error(error)
        if message:  # without a command the help is printed
            print_error(message)
        return exit_code
    return code if isinstance(code, int) else 0
