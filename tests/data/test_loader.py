"""Which samples a step trains on, on every replica, and how they are read ahead; batches of similar length."""

import multiprocessing.synchronize
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data._utils import worker as torchs_worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from common.errors import DataError
from data.dataset import InMemory, Source
from data.loader import WINDOW, EvalBatches, Steps, TrainBatches, VariableLength, bucket_widths, train_loader


def numbered(n: int) -> InMemory:
    """n samples; sample i is the number i."""
    return InMemory(torch.arange(n), torch.arange(n) * 10)


class Made(Source):
    """Counts its batches, each of which says which process has read it, and does what it is told before the third."""

    reads, parent = 0, os.getpid()

    def __init__(self, before=None, seconds=0.0):
        self.before, self.seconds = before, seconds

    def __len__(self):
        return 1000

    def read(self, indices, epoch):
        time.sleep(self.seconds)
        if self.reads == 2 and self.before:
            self.before()
        self.reads += 1
        return torch.full((len(indices),), os.getpid()), torch.zeros(len(indices))


def damaged():
    raise DataError("sample 42 is damaged")


def killed():
    """As the kernel ends a process that reads when memory runs out."""
    if os.getpid() != Made.parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Lengths(VariableLength):
    """Sample i is its number, as often as it is long; the rest is -1."""

    def __init__(self, lengths, longest: int = 256):
        self.all = np.asarray(lengths)
        self.widths = bucket_widths(longest)

    def __len__(self):
        return len(self.all)

    def lengths(self, indices):
        return self.all[indices]

    def read(self, indices, epoch, width=None):
        width = width or self.widths[-1]
        inputs = np.where(np.arange(width) < self.all[indices][:, None], indices[:, None], -1)
        return torch.from_numpy(inputs), torch.from_numpy(indices)


LENGTHS = Lengths(np.clip(np.exp(np.random.default_rng(3).normal(4, 0.7, 5003)), 1, 256).astype(int))
SOURCES = pytest.mark.parametrize("source", [numbered(103), LENGTHS], ids=["plain", "in buckets"])


@SOURCES
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_slices_of_all_replicas_have_one_shape_and_make_up_the_same_global_batch(source, dp_size):
    whole = TrainBatches(source, 8, seed=1)
    parts = [TrainBatches(source, 8, 1, rank, dp_size) for rank in range(dp_size)]
    assert {part.steps_per_epoch for part in parts} == {whole.steps_per_epoch} == {len(source) // 8}
    for step in (1, 2, 13, whole.steps_per_epoch, whole.steps_per_epoch + 1):
        slices = [part[step] for part in parts]
        assert {one.inputs.shape for one in slices} == {(8 // dp_size, *whole[step].inputs.shape[1:])}
        assert torch.equal(torch.cat([one.inputs for one in slices]), whole[step].inputs)
        assert torch.equal(torch.cat([one.targets for one in slices]), whole[step].targets)


@SOURCES
def test_an_epoch_gives_each_sample_at_most_once_and_the_next_one_others_in_another_order(source):
    batches = TrainBatches(source, 8, seed=1)
    steps = batches.steps_per_epoch
    epochs = [[i for s in range(steps) for i in batches[e * steps + s + 1].targets.tolist()] for e in range(3)]
    assert all(len(set(epoch)) == len(epoch) == steps * 8 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and set(epochs[0]) != set(epochs[1])
    assert set(epochs[0]) | set(epochs[1]) | set(epochs[2]) == set(source.read(np.arange(len(source)), 0)[1].tolist())
    assert TrainBatches(source, 8, seed=2)[1].targets.tolist() != epochs[0][:8]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_with_two_inputs_are_read_for_training_and_evaluation(num_workers):
    source = InMemory((torch.arange(10), torch.arange(10) + 0.5), torch.arange(10))
    for _, batch in train_loader(TrainBatches(source, 4, seed=1), 1, 3, num_workers):
        first, second = batch.inputs
        assert torch.equal(first, batch.targets) and torch.equal(second, first + 0.5)
    for batch in EvalBatches(source, 4):
        assert torch.equal(batch.inputs[1], batch.inputs[0] + 0.5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_at_a_step_gives_the_batches_of_an_uninterrupted_run(num_workers):
    batches = TrainBatches(numbered(50), 8, seed=1)
    run = {step: batch.inputs.tolist() for step, batch in train_loader(batches, 1, 15)}
    resumed = {s: batch.inputs.tolist() for s, batch in train_loader(batches, 10, 15, num_workers)}
    assert list(resumed) == [10, 11, 12, 13, 14, 15]
    assert resumed == {step: run[step] for step in resumed}


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: TrainBatches(numbered(50), 8, 1)[0], "count from 1"),
        (lambda: TrainBatches(numbered(50), 10, 1, 0, 4), "global_batch_size=10 .* 4 replicas.* 8 and 12"),
        (lambda: EvalBatches(numbered(50), 10, 0, 4), "global_batch_size=10 .* 4 replicas.* 8 and 12"),
        (lambda: EvalBatches(numbered(33), 8, limit=0), "eval_batches=0"),
    ],
)
def test_numbers_that_do_not_fit_are_errors_that_state_them_and_the_nearest_that_do(build, message):
    with pytest.raises(ValueError, match=message):  # of which DataError is one
        build()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_while_reading_ahead_is_raised_where_the_batch_is_used(num_workers):
    seen = []
    with pytest.raises(DataError, match="sample 42 is damaged"):
        for step, _ in train_loader(TrainBatches(Made(damaged), 4, seed=1), 1, 10, num_workers):
            seen.append(step)
    assert seen == [1, 2]


def test_batches_are_read_before_they_are_asked_for_until_their_consumer_ends():
    def readers():
        return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]

    source = Made(seconds=0.05)
    loader = train_loader(TrainBatches(source, 4, seed=1), 1, 200)
    next(loader)
    end = time.monotonic() + 10
    while source.reads < 3:
        assert time.monotonic() < end, f"{source.reads} batches read after 10 s, 1 of them asked for"
        time.sleep(0.01)
    assert readers()
    loader.close()
    assert source.reads < 10 and not readers()


def test_the_thread_that_reads_computes_on_one_thread_and_leaves_the_others_theirs():
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        list(train_loader(TrainBatches(Made(lambda: seen.append(torch.get_num_threads())), 2, 0), 1, 4))
        assert seen == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_signals_for_the_whole_process_group_leave_reading_processes_alive():
    loader = train_loader(TrainBatches(Made(seconds=0.05), 4, seed=1), 1, 12, num_workers=1)
    _, first = next(loader)
    worker = int(first.inputs[0])
    assert worker != os.getpid()
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker, number)
    assert {int(batch.inputs[0]) for _, batch in loader} == {worker}


def test_reading_processes_leave_the_random_state_of_the_run_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(train_loader(TrainBatches(numbered(50), 8, seed=1), 1, 2, num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("samples", [1, 8, 33])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_evaluation_sees_every_sample_exactly_once(samples, dp_size):
    replicas = [list(EvalBatches(numbered(samples), 8, rank, dp_size)) for rank in range(dp_size)]
    assert {len(batches) for batches in replicas} == {-(-samples // 8)}
    assert {len(batch) for batches in replicas for batch in batches} == {8 // dp_size}
    in_order = [batch for batches in zip(*replicas, strict=True) for batch in batches]
    counted = torch.cat([batch.inputs[batch.weights == 1] for batch in in_order])
    assert counted.tolist() == list(range(samples))
    weights = torch.cat([batch.weights for batch in in_order])
    assert weights.sum() == samples and set(weights.tolist()) <= {0.0, 1.0}


def test_a_limited_evaluation_takes_samples_spread_evenly_over_the_split_and_the_same_ones_on_all_replicas():
    batches = EvalBatches(numbered(1000), 8, limit=2)
    assert (len(batches), batches.whole) == (2, 125)
    samples = torch.cat([batch.inputs for batch in batches]).tolist()
    assert samples == torch.cat([batch.inputs for batch in batches]).tolist()
    assert {b - a for a, b in zip(samples, samples[1:], strict=False)} <= {62, 63}
    assert samples[0] == 1000 - 1 - samples[-1], "as far from the beginning as from the end"
    assert all(batch.weights.all() for batch in batches)
    parts = [EvalBatches(numbered(1000), 8, rank, 2, limit=2) for rank in range(2)]
    assert [x for pair in zip(*parts, strict=True) for batch in pair for x in batch.inputs.tolist()] == samples


def test_batches_need_no_shared_memory():
    """A batch through /dev/shm is a file there; Docker's holds 64 MB, and what does not fit is lost."""
    before = psutil.disk_usage("/dev/shm").used
    source = InMemory(torch.arange(12.0)[:, None].expand(12, 2_000_000), torch.arange(12))  # 32 MB a batch
    loader = train_loader(TrainBatches(source, 4, seed=1), 1, 3, num_workers=1)
    most = 0
    for _, batch in loader:
        assert batch.inputs.shape == (4, 2_000_000)
        most = max(most, psutil.disk_usage("/dev/shm").used - before)
    assert most < 16e6


def read_and_wait(readers):
    """In a new process: read one batch, and send the ids of the processes that read."""
    multiprocessing.set_start_method(None, force=True)  # as it is in a process that nobody has forked
    torchs_worker.MP_STATUS_CHECK_INTERVAL = 0.2  # after each 5 s it looks whether its parent lives
    source = InMemory(torch.zeros(12, 1_000_000), torch.zeros(12))
    loader = train_loader(TrainBatches(source, 4, seed=1), 1, 100, num_workers=1)
    next(loader)
    time.sleep(1)  # the next batch fills the pipe
    readers.send([child.pid for child in psutil.Process().children(recursive=True)])
    time.sleep(60)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_reading_process_with_a_batch_that_nobody_takes():
    context = multiprocessing.get_context("forkserver")
    readers, given = context.Pipe(duplex=False)
    reading = context.Process(target=read_and_wait, args=(given,))
    reading.start()
    try:
        workers = [psutil.Process(pid) for pid in readers.recv()]
    finally:
        reading.kill()
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_without_room_for_semaphores_the_error_names_shared_memory_and_the_way_out(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", full)
    with pytest.raises(DataError, match=r"data.num_workers=2.*No space left.*/dev/shm.*data.num_workers=0"):
        next(train_loader(TrainBatches(numbered(50), 8, seed=1), 1, 2, num_workers=2))


def test_a_reading_process_that_is_killed_is_an_error_with_the_way_out(monkeypatch):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # asked after each 5 s
    seen = []
    with pytest.raises(DataError, match=r"data.num_workers=1: a process that reads data was killed.*num_workers=0"):
        for step, _ in train_loader(TrainBatches(Made(killed), 4, seed=1), 1, 10, num_workers=1):
            seen.append(step)
    assert 3 not in seen


def test_a_batch_that_does_not_come_is_an_error_that_names_its_step():
    with pytest.raises(DataError, match=r"the batch of step 1 was not read within 0.01 s \(parallel.timeout_s\)"):
        next(train_loader(TrainBatches(Made(seconds=0.05), 4, seed=1), 1, 3, timeout_s=0.01))


# -- batches of similar length ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "longest, widths",
    [(1024, (128, 256, 384, 512, 768, 1024)), (256, (32, 64, 96, 128, 192, 256)), (20, (8, 16, 20)), (3, (3,))],
)
def test_widths_are_few_multiples_of_8_and_the_longest(longest, widths):
    assert bucket_widths(longest) == widths


def test_a_batch_has_the_narrowest_width_that_holds_its_longest_sample():
    batches = TrainBatches(LENGTHS, 8, 1)
    seen = set()
    for step in range(1, 200):
        batch = batches[step]
        longest, width = int(LENGTHS.all[batch.targets].max()), batch.inputs.shape[1]
        assert width == min(w for w in LENGTHS.widths if w >= longest)
        seen.add(width)
    assert seen <= set(LENGTHS.widths) and len(seen) > 2


def test_the_samples_of_a_window_are_those_without_buckets_with_less_than_half_of_the_padding():
    bucketed, plain = TrainBatches(LENGTHS, 8, 1), TrainBatches(LENGTHS, 8, 1)
    plain._steps = Steps(LENGTHS, 8, 1)
    padding = {}
    for name, batches in (("bucketed", bucketed), ("plain", plain)):
        read = [batches[step] for step in range(1, 2 * WINDOW + 1)]
        padding[name] = sum((b.inputs == -1).sum().item() for b in read) / sum(b.inputs.numel() for b in read)
        windows = [sorted(i for b in part for i in b.targets.tolist()) for part in (read[:WINDOW], read[WINDOW:])]
        assert windows == padding.setdefault("windows", windows)
    assert padding["plain"] > 0.7 and padding["bucketed"] < 0.25


def test_a_step_is_a_function_of_seed_and_step_alone():
    forward = TrainBatches(LENGTHS, 8, 1)
    expected = {step: forward[step].inputs for step in range(1, 150)}
    backward = TrainBatches(LENGTHS, 8, 1)
    for step in reversed(expected):
        assert torch.equal(backward[step].inputs, expected[step])
    assert not torch.equal(TrainBatches(LENGTHS, 8, 2)[1].targets, forward[1].targets)


# -- another size of the global batch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [numbered(1000), Lengths(LENGTHS.all[:1000])], ids=["any length", "by length"])
@pytest.mark.parametrize(
    "earlier, size",
    [([(3, 8)], 4), ([(3, 8)], 16), ([(7, 16)], 5), ([(3, 8), (5, 4), (6, 32)], 3), ([(130, 16)], 8), ([(41, 24)], 1)],
)
def test_after_another_global_batch_size_no_sample_of_the_epoch_is_repeated_or_left_out(
    monkeypatch, source, earlier, size
):
    seen, read = {}, type(source).read

    def noted(self, indices, epoch, *width):
        seen.setdefault(epoch, []).extend(indices)
        return read(self, indices, epoch, *width)

    monkeypatch.setattr(type(source), "read", noted)
    first = 1
    for place, (last, before) in enumerate(earlier):
        batches = TrainBatches(source, before, 7, earlier=earlier[:place])
        for step in range(first, last + 1):
            batches[step]
        first = last + 1
    batches = TrainBatches(source, size, 7, earlier=earlier)
    epoch = max(seen)
    for step in range(first, batches.steps_until(epoch + 2) + 1):
        batches[step]
    assert [*seen] == [*range(epoch + 2)]
    for samples in seen.values():
        assert len({*samples}) == len(samples)
    assert len(seen[epoch]) > 1000 - size and len(seen[epoch + 1]) == 1000 // size * size
