"""`python -m mmspec.cli`."""

import sys

from mmspec.cli import main

sys.exit(main())
