"""The harness is checked before it is believed."""

import abc
from typing import Any

import pytest
from lm_eval.api.model import TemplateLM

from megatron.errors import MachineError
from tasks.eval_harness.interface import TESTED, check_interface, check_version


def test_the_installed_harness_is_known() -> None:
    check_interface(TemplateLM)


@pytest.mark.parametrize("version", ["0.4.2", "0.5.0", "1.0", "unknown"])
def test_other_versions_are_refused(version: str) -> None:
    check_version(TESTED)
    with pytest.raises(MachineError, match="this version of lm-eval-harness is not known here"):
        check_version(version)


def test_another_signature_is_seen() -> None:
    class Changed(TemplateLM):  # type: ignore[misc]
        def tok_encode(self, string: str) -> Any: ...

        @abc.abstractmethod
        def score_all(self) -> None: ...

    with pytest.raises(MachineError, match="calls models in another way") as raised:
        check_interface(Changed)
    assert "score_all is new" in str(raised.value)
    assert "tok_encode(self, string), expected" in str(raised.value)
    with pytest.raises(MachineError, match="eot_token_id is gone"):
        check_interface(type("Empty", (), {}))
