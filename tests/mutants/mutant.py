"""One small error in the code, and the test that has to fail while it is there."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """An edit of one file that breaks a promise.

    Attributes:
        promise: what is true of the code, and not while the error is in it; a sentence.
        file: path from the root of the repository.
        before: text that occurs exactly once in the file.
        after: what replaces it. The module must still import, so that only a test fails.
        test: the cheapest test that fails, as pytest names it.
    """

    promise: str
    file: str
    before: str
    after: str
    test: str

    def mutated(self, root: Path) -> str:
        """Return the text of the file with the error in it.

        Raises:
            LookupError: `before` does not occur exactly once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.before)) != 1:
            raise LookupError(f"{self.file} has {count} times: {self.before!r}")
        return text.replace(self.before, self.after)
