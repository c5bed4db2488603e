"""The command line: `mmspec generate | recipes | show | doctor | bench | certify | train | zoo`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. An error is one line, unless MMSPEC_DEBUG=1."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from mmspec.cli.output import complain, line

    try:
        from mmspec.cli.app import commands  # options are made now, of whatever is installed

        typed = None if arguments is None else list(arguments)
        code = commands()(args=typed, standalone_mode=False)
    except KeyboardInterrupt:
        complain("interrupted; nothing was written")
        return 130
    except Exception as error:
        if os.environ.get("MMSPEC_DEBUG") == "1":
            raise
        message, exit_code = line(error)
        if message:  # without a command the help was printed
            complain(message)
        return exit_code
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
