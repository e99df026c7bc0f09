"""`import megatron` costs nothing, and still gives the familiar names."""

import subprocess
import sys

import pytest

import megatron
from tests.architecture.source_tree import ROOT


def test_the_familiar_names_are_those_of_their_modules() -> None:
    from megatron.global_vars import get_args
    from megatron.training import pretrain

    assert megatron.get_args is get_args
    assert megatron.pretrain is pretrain
    assert set(megatron.__all__) >= {"get_args", "get_timers", "get_tokenizer", "pretrain"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'megatron' has no attribute 'pretain'"):
        _ = megatron.pretain


def test_importing_the_package_imports_no_other_module_of_it() -> None:
    probe = "import sys, megatron; print([m for m in sys.modules if m.startswith('megatron.')])"
    run = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
