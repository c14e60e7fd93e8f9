"""Run the command line: ``python -m cactus_theory``."""

import sys

from cactus_theory.cli import main

sys.exit(main())
