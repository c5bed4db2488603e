"""How libraries behave while a command runs."""

from __future__ import annotations

import os


def quiet() -> None:
    """Keep the libraries' own bars and remarks off the terminal."""
    from transformers.utils import logging

    if os.environ.get("MMSPEC_DEBUG") != "1":
        logging.set_verbosity_error()
    logging.disable_progress_bar()
