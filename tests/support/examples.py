"""How many examples of a property are drawn: a quarter in `make test`, all in `make test-all`."""

import hypothesis

_QUICK = 4  # of how many examples one is drawn
_FEWEST = 15


def examples(full: int) -> hypothesis.settings:
    """Settings of a property for which `full` examples are drawn under the profile `full`."""
    if hypothesis.settings.get_current_profile_name() == "full":
        return hypothesis.settings(max_examples=full)
    return hypothesis.settings(max_examples=min(full, max(_FEWEST, full // _QUICK)))
