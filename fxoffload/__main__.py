"""`python -m fxoffload` is the script `fxoffload`."""

import sys

from fxoffload.cli import main

sys.exit(main())
