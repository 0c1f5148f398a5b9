"""`python -m cuflash`: the command line without the installed script."""

import sys

if __name__ == "__main__":
    try:
        from cuflash.cli import main

        code = main()
    except KeyboardInterrupt:  # while modules are still being loaded
        code = 130
    sys.exit(code)
