"""Starts a script in a process and a group of its own, and hands signals on, as launchers do.

python launcher.py train.py --its-own-options
"""

import os
import signal
import subprocess
import sys

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
child = subprocess.Popen([sys.executable, "-u", *sys.argv[1:]], process_group=0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: child.send_signal(number))
sys.exit(child.wait())
