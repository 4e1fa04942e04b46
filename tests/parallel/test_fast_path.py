"""Calls that their caller's thread makes by itself: nobody may tell by more than the time."""

import mmap
import random
import signal
import struct
import threading
import time

import numpy as np
import pytest

import hvdlite
from hvdlite.errors import DuplicateNameError, MismatchError
from hvdlite.runtime import default_runtime

RANKS = (2, 3)
ALONE = True


def _num_own_calls():
    return default_runtime().background._fast_path.num_calls


def _call_often(name, values, count=60, **options):
    """The results of equal calls, some of which were made by this thread; on a busy machine that may take some more."""
    before, results = _num_own_calls(), []
    for _ in range(30):
        results += [hvdlite.allreduce(values, name=name, **options) for _ in range(count)]
        least = hvdlite.allreduce_async(float(_num_own_calls() - before), op=hvdlite.Min, name="least").wait()
        if least >= 5:
            return results
    raise AssertionError(f"{least} of {len(results)} calls were made by this thread")


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("size", [1, 7, 512])
def test_results_are_those_of_the_background_thread_bit_by_bit(dtype, size):
    generator = np.random.default_rng(hvdlite.rank())
    values = (generator.standard_normal(size) * 1000).astype(dtype)
    for op in (hvdlite.Sum, hvdlite.Average):
        for postscale in (1.0, 0.3):
            options = {"op": op, "postscale_factor": postscale}
            expected = hvdlite.allreduce_async(values, name="slow", **options).wait()
            for result in _call_often("fast", values, **options):
                assert result.dtype == expected.dtype and result.tobytes() == expected.tobytes()


def test_in_place_and_torch_and_unnamed():
    torch = pytest.importorskip("torch")
    import hvdlite.torch as hvd

    before = _num_own_calls()
    for step in range(200):
        array = np.full(3, step, np.float32)
        assert hvdlite.allreduce_(array, name="place", op=hvdlite.Sum) is array
        assert array.tolist() == [step * hvdlite.size()] * 3
        assert hvd.allreduce(torch.full((2, 2), float(step))).tolist() == [[step, step]] * 2
    assert _num_own_calls() > before


def test_a_late_rank_a_rank_that_leaves_it_to_its_background_thread_and_a_call_for_the_other_ranks_only():
    random.seed(hvdlite.rank())
    total = 0.0
    for step in range(150):
        if random.random() < 0.2:
            time.sleep(random.random() * 3e-3)
        if random.random() < 0.3:
            total += hvdlite.allreduce_async(1.0, name="mixed", op=hvdlite.Sum).wait()
        else:
            total += hvdlite.allreduce(1.0, name="mixed", op=hvdlite.Sum)
        if step % 10 == 0:
            handles = [hvdlite.allreduce_async(np.ones(4), name=f"beside.{number}") for number in range(3)]
            total += hvdlite.allreduce(1.0, name="among", op=hvdlite.Sum) - hvdlite.size()
            assert all(handle.wait().tolist() == [1] * 4 for handle in handles)
    assert total == 150 * hvdlite.size()


def test_threads_take_turns():
    errors = []

    def work(number):
        try:
            for step in range(80):
                expected = hvdlite.size() * (step + number)
                assert hvdlite.allreduce(float(step + number), name=f"thread.{number}", op=hvdlite.Sum) == expected
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors


def test_a_name_in_flight_is_refused_also_while_its_caller_works_by_itself():
    for _ in range(20):
        hvdlite.allreduce(1.0, name="twice")
    if hvdlite.rank() == 0:
        done = []
        other = threading.Thread(target=lambda: done.append(hvdlite.allreduce(1.0, name="twice", op=hvdlite.Average)))
        other.start()
        time.sleep(random.choice([0.0, 1e-4, 0.05]))
        while other.is_alive() and not done:
            try:
                handle = hvdlite.allreduce_async(1.0, name="twice")
            except DuplicateNameError:
                break
            raise AssertionError(f"accepted twice: {handle}")
    hvdlite.barrier()
    if hvdlite.rank() == 0:
        other.join(10) if hvdlite.size() == 1 else None
    else:
        hvdlite.allreduce(1.0, name="twice")
    if hvdlite.rank() == 0:
        other.join(10)
        assert done == [1.0]


def test_another_shape_after_many_calls_fails_on_every_rank_at_once():
    _call_often("shape", np.ones(4))
    began = time.monotonic()
    with pytest.raises(MismatchError):
        hvdlite.allreduce(np.ones(4 + (hvdlite.rank() == 0)), name="shape")
    assert time.monotonic() - began < 1
    _call_often("shape", np.ones(4))


def test_slots_stay_equal_when_they_are_few(restart):
    restart(CACHE_CAPACITY=4)
    random.seed(0)  # the same names everywhere
    for step in range(400):
        name = f"few.{min(int(random.expovariate(0.4)), 9)}"
        if hvdlite.rank() == step % hvdlite.size():
            assert hvdlite.allreduce(float(step), name=name, op=hvdlite.Sum) == step * hvdlite.size()
        else:  # these wake their background thread
            assert hvdlite.allreduce_async(float(step), name=name, op=hvdlite.Sum).wait() == step * hvdlite.size()
    hvdlite.barrier()  # by the background thread, which first looks at what was done without it
    slots = default_runtime().background.slots
    keys = [str(slots._keys), str(list(slots._recency))]
    hvdlite.barrier()
    assert hvdlite.allgather_object(keys) == [keys] * hvdlite.size()


class Interrupted(Exception):
    pass


def test_a_signal_whose_handler_raises_at_any_moment_breaks_nothing(tmp_path):
    """Rank 0 is interrupted at random; what the others have done tells whether an interrupted call counts."""
    path = hvdlite.broadcast_object(str(tmp_path / "done"), 0)
    if hvdlite.rank() == 0:
        with open(path, "wb") as file:
            file.write(bytes(8))
    hvdlite.barrier()
    with open(path, "r+b") as file:
        done = mmap.mmap(file.fileno(), 8)

    num_steps, num_interrupts = 2000, 0
    random.seed(3)
    if hvdlite.rank():
        for step in range(num_steps):
            assert hvdlite.allreduce(float(step), name="interrupted", op=hvdlite.Sum) == step * hvdlite.size()
            if hvdlite.rank() == 1:
                done[:8] = struct.pack("q", step + 1)
    else:
        reached, offers = [0], default_runtime().background.queue._offers

        def handler(number, frame):
            raise Interrupted

        def work():
            while reached[0] < num_steps:
                step = reached[0]
                if num_interrupts < 20 and random.random() < 0.05:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-6, 80e-6))
                try:
                    result = hvdlite.allreduce(float(step), name="interrupted", op=hvdlite.Sum)
                except DuplicateNameError:  # in flight, or it was until now
                    reached[0] = max(step, struct.unpack("q", done[:8])[0])
                    continue
                assert result == step * hvdlite.size()
                reached[0] = step + 1

        former = signal.signal(signal.SIGALRM, handler)
        try:
            while True:
                try:
                    work()
                    break
                except Interrupted:
                    num_interrupts += 1
                    deadline = time.monotonic() + 0.2
                    while time.monotonic() < deadline and struct.unpack("q", done[:8])[0] <= reached[0]:
                        time.sleep(0.01)
                    reached[0] = max(reached[0], struct.unpack("q", done[:8])[0])
                    # Other threads may use the name again, whether or not this one makes another call.
                    while offers and time.monotonic() < deadline + 5:
                        time.sleep(0.001)
                    assert not offers
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
        assert num_interrupts >= 15
    hvdlite.barrier()
    _call_often("interrupted", np.ones(1))


