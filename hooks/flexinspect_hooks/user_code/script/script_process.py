"""The entry point of the process that `flexinspect run SCRIPT` starts.

A file and not a module, so that Python does not add the current folder to the program's path.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this file's folder, which the user's program would not have on its path

from flexinspect_hooks.user_code.script.script_run import main

sys.exit(main(int(sys.argv[1])))
