"""`python -m rfsoftmax` is the command `rfsoftmax`."""

import sys

from .lab.cli import main

sys.exit(main())
