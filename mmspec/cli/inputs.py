"""How libraries behave while a command runs."""

from __future__ import annotations

import os
import sys
from importlib import import_module


def quiet() -> None:
    """Keep the bars and remarks of transformers, and of diffusers where it is loaded, to itself."""
    for library in ("transformers", "diffusers"):
        if library == "transformers" or library in sys.modules:
            logging = import_module(f"{library}.utils.logging")
            if os.environ.get("MMSPEC_DEBUG") != "1":
                logging.set_verbosity_error()
            logging.disable_progress_bar()
