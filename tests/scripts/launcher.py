"""Starts a script in a process of its own, as DeepSpeed's launcher does.

python launcher.py train.py --its-own-options
"""

import os
import subprocess
import sys

ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
sys.exit(subprocess.Popen([sys.executable, "-u", *sys.argv[1:]], env=os.environ | ranks).wait())
