"""`python -m flexinspect` is the same as the command `flexinspect`."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C is a word from the first moment, not a traceback."""
    try:
        from flexinspect.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:  # while the commands themselves were loaded
        sys.stderr.write("flexinspect: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
