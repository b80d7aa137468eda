"""``python -m rkmate.cli``: the command, without its script."""

import sys

from rkmate.cli.main import main

sys.exit(main())
