"""Another Megatron's path of tools/retrieval/create_doc_index.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.other_programs.start import start

if __name__ == "__main__":
    start("tools/create_doc_index.py")
