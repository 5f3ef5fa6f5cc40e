"""`python -m flexinspect` is the same as the command `flexinspect`."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C prints one line instead of a traceback, also while importing."""
    code = 130
    try:
        from flexinspect.core.signals import exit_code_of, raise_on_end_signals

        raise_on_end_signals()
        try:
            from flexinspect.cli.main import main as run_command

            return run_command()
        except KeyboardInterrupt as error:  # during the imports; `run_command` handles it later
            code = exit_code_of(error)
            raise
    except KeyboardInterrupt:
        sys.stderr.write("flexinspect: interrupted\n")
        return code


if __name__ == "__main__":
    sys.exit(main())
