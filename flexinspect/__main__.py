"""`python -m flexinspect` is the same as the command `flexinspect`."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C prints one line instead of a traceback, also while importing."""
    try:
        from flexinspect.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:  # during the imports; `run_command` handles it afterwards
        sys.stderr.write("flexinspect: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
