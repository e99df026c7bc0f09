"""Another Megatron's path of tools/inspect_checkpoint.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.other_programs.start import start

if __name__ == "__main__":
    start("tools/convert_checkpoint/inspect_checkpoint.py")
