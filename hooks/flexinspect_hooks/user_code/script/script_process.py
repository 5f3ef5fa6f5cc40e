"""What `flexinspect run SCRIPT` starts, as a file: Python must not put our folder on the path."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this file's folder, which a program of the user's would not have there

from flexinspect_hooks.user_code.script.script_run import main

sys.exit(main(int(sys.argv[1])))
