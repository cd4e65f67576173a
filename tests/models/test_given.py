"""Objects that a Python program gives to the processes of its run."""

import threading

import pytest
from torch import nn

from common.errors import UserError
from models.given import pack_given, set_given


def with_lock() -> nn.Module:
    net = nn.Linear(2, 2)
    net.lock = threading.Lock()
    return net


@pytest.mark.parametrize(
    "make, reason",
    [(with_lock, "lock"), (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized modules")],
    ids=["a lock", "parametrized"],
)
def test_what_cannot_be_sent_is_an_error_that_says_why(make, reason):
    set_given({"model": make()})
    try:
        with pytest.raises(UserError, match=f"model cannot be sent to the run's processes: .*{reason}"):
            pack_given()
    finally:
        set_given(None)
