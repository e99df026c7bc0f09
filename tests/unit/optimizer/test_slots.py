"""What the optimizer keeps of a parameter, by kind."""

import torch
from torch.nn import Parameter

from megatron.optimizer.slots import MASTER, Slot


def test_a_master_is_kept_where_the_rule_works_on_a_copy() -> None:
    parameter, mean = Parameter(torch.ones(3)), torch.zeros(3)
    values = parameter.detach()
    own = Slot("a", parameter, None, values, values, {"exp_avg": mean, "none": None})  # type: ignore[dict-item]
    assert not own.has_master
    assert own.tensors() == {"exp_avg": mean}
    master = values.double()
    wide = Slot("a", parameter, None, values, master, {"exp_avg": mean})
    assert wide.has_master
    assert wide.tensors()[MASTER] is master
