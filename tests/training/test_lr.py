"""Learning-rate schedules, by numbers worked out by hand."""

import pytest

from training.optimizer import Constant, CosineWarmup, Step

PEAK = 6e-4


@pytest.mark.parametrize(
    "step, lr",
    [
        (1, 6.0e-5),  # a tenth of the peak
        (5, 3.0e-4),
        (10, 6.0e-4),
        (11, 6.0e-4),  # the cosine begins at its top
        (21, 5.209188e-4),  # a quarter of the way: 6e-5 + 5.4e-4 * (1 + cos(45°)) / 2
        (31, 3.3e-4),  # half
        (41, 1.390812e-4),  # three quarters
        (50, 6.083229e-5),  # 39/40: the end of the cosine is one step further
        (51, 6.0e-5),
        (500, 6.0e-5),  # and does not rise again
    ],
)
def test_cosine_with_ten_of_fifty_steps_of_warm_up_as_in_llm_c(step, lr):
    schedule = CosineWarmup(warmup_steps=10, min_ratio=0.1)
    assert PEAK * schedule.factor(step, total=50, per_epoch=7) == pytest.approx(lr, rel=1e-6)


def test_warm_up_takes_a_fifth_of_the_run_where_nothing_is_said():
    schedule = CosineWarmup(warmup_steps=None, min_ratio=0.0)
    factors = [schedule.factor(step, total=20, per_epoch=1) for step in range(1, 21)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[12] == pytest.approx(0.5)  # 8 of 16 steps behind the warm-up


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert CosineWarmup(0, 0.1).factor(1, total=50, per_epoch=1) == 1.0
    assert CosineWarmup(None, 0.1).factor(1, total=1, per_epoch=1) == 1.0


def test_a_warm_up_longer_than_the_run_is_cut_off():
    assert CosineWarmup(100, 0.1).factor(10, total=10, per_epoch=1) == pytest.approx(0.1)


def test_steps_of_epochs_multiply_after_every_whole_number_of_epochs():
    schedule = Step(every=2, unit="epoch", gamma=0.5)
    factors = [schedule.factor(step, total=100, per_epoch=3) for step in (1, 6, 7, 12, 13)]
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_steps_of_steps_do_not_look_at_epochs():
    schedule = Step(every=3, unit="step", gamma=0.1)
    factors = [schedule.factor(step, total=100, per_epoch=50) for step in (1, 3, 4, 6, 7)]
    assert factors == pytest.approx([1.0, 1.0, 0.1, 0.1, 0.01])


def test_constant_stays():
    assert [Constant().factor(step, 10, 1) for step in (1, 5, 10)] == [1.0, 1.0, 1.0]
