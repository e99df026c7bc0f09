"""Documents for the tools that clean text: words by seed, and files of JSON lines."""

import json
import random
from collections.abc import Sequence
from pathlib import Path


def words(count: int, seed: int) -> list[str]:
    """So many words of random letters; the same for the same seed."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(count)]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """Write each text as a line with its number under `id`."""
    path.write_text("".join(json.dumps({"id": n, "text": t}) + "\n" for n, t in enumerate(texts)))
    return path


def json_lines(path: Path) -> list[dict[str, object]]:
    """The objects that a file holds."""
    return [json.loads(line) for line in path.read_text().splitlines()]
