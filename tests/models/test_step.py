"""The number of the step, which code reads whose coefficients follow it."""

import pytest
import torch

from models import step


@pytest.mark.slow
def test_code_that_follows_the_step_is_not_compiled_again_for_each_step():
    from torch._dynamo.testing import CompileCounter

    counter, x = CompileCounter(), torch.ones(3)
    step.leave_uncompiled()
    compiled = torch.compile(lambda x: x * min(1.0, step.current_step() / 20), backend=counter)
    for number in range(1, 31):
        step.set_step(number)
        torch.testing.assert_close(compiled(x), x * min(1.0, number / 20))
    assert counter.frame_count <= 3
