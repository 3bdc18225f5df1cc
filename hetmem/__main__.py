"""`python -m hetmem`: the command line."""

import sys

from hetmem.cli import main

if __name__ == "__main__":
    sys.exit(main())
