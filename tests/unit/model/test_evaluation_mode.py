"""Each module gets its own mode back, after an error too."""

import pytest
from torch import nn

from megatron.model.evaluation_mode import evaluation_mode


def two_layers(*, frozen: int) -> nn.Sequential:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))
    list(module.modules())[frozen].eval()
    return module


@pytest.mark.parametrize("frozen", range(5))
def test_every_module_gets_its_own_mode_back(frozen: int) -> None:
    module = two_layers(frozen=frozen)
    before = [each.training for each in module.modules()]
    with evaluation_mode(module):
        assert not any(each.training for each in module.modules())
    assert [each.training for each in module.modules()] == before
    with pytest.raises(ZeroDivisionError), evaluation_mode(module):
        _ = 1 / 0
    assert [each.training for each in module.modules()] == before
