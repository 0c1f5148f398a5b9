"""`python -m cuflash`: the command line without the installed script."""

import sys

from cuflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
