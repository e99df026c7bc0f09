"""Another Megatron's path of tools/convert_checkpoint.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.other_programs.start import start

if __name__ == "__main__":
    start("tools/convert_checkpoint/ds_to_universal.py")
