"""``python -m rkmate``: the command, without its script."""

import sys

from rkmate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
