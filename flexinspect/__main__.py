"""`python -m flexinspect` is the same as the command `flexinspect`."""

import sys


def main() -> int:
    """Run the command line; a signal prints one line instead of a traceback, also at the start."""
    try:
        from flexinspect.core.signals import raise_on_end_signals

        raise_on_end_signals()
        from flexinspect.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt as error:  # during the imports; `run_command` handles it afterwards
        sys.stderr.write("flexinspect: interrupted\n")
        return 128 + int(getattr(error, "number", 2))


if __name__ == "__main__":
    sys.exit(main())
