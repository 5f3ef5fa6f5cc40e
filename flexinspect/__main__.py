"""`python -m flexinspect` is the same as the command `flexinspect`."""

import sys

from flexinspect.commands import main

if __name__ == "__main__":
    sys.exit(main())
