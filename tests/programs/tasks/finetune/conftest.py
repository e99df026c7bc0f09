"""One pretrained BERT for all tests of fine-tuning."""

import pytest

from tests.programs.tasks.finetune.runs import Prepared, prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("bert"))
