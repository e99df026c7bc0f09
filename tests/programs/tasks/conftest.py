"""Trained models that tests of several tasks read."""

import pytest

from tests.programs.tasks.models import Exported, exported_gpt, tiny_gpt_checkpoint


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported_gpt(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_gpt_checkpoint(tmp_path_factory.mktemp("tiny_gpt"))
