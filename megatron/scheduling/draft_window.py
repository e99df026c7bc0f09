"""How many tokens are proposed for a sequence, by what became of those before: arithmetic.

All ranks count the same tokens, so all of them plan the same room. Texts do not depend on it.
"""

from dataclasses import dataclass, replace

LONGEST_PAUSE = 64  # steps: what is tried in vain costs a row in so many


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """What the next steps of a sequence have room for.

    Attributes:
        size: tokens that are proposed at most, when some are.
        pause: steps before any are proposed again.
        next_pause: steps of the next pause, which follows when one token alone was wrong.
    """

    size: int
    pause: int = 0
    next_pause: int = 1

    @property
    def room(self) -> int:
        """Most tokens that are proposed in the next step."""
        return 0 if self.pause else self.size


def window_after(window: DraftWindow, *, proposed: int, accepted: int, most: int) -> DraftWindow:
    """Return the window after a step that drew a token.

    It doubles when all proposed tokens were drawn, is one more than those that were drawn
    otherwise, and halves when none was. When even one token was wrong there is a pause, twice as
    long each time, up to `LONGEST_PAUSE` steps; a token that is right ends that.

    Args:
        proposed: tokens in that step; 0 leaves the size as it is.
        accepted: of them, those that were drawn.
        most: of the engine.
    """
    if proposed == 0:
        return replace(window, pause=max(0, window.pause - 1))
    if accepted == proposed:
        return DraftWindow(min(most, 2 * max(window.size, 1)))
    if accepted > 0:
        return DraftWindow(min(most, accepted + 1))
    if proposed > 1 and window.size > 1:
        return replace(window, size=window.size // 2)
    longer = min(LONGEST_PAUSE, 2 * window.next_pause)
    return DraftWindow(1, pause=window.next_pause, next_pause=longer)
