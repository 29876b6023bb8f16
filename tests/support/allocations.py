"""How much memory work takes at most: what PyTorch's and Python's allocators gave out, to the byte."""

import tracemalloc
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work):
    """Bytes that work holds at most at a time beyond what was held before: tensors on the CPU, and Python with numpy.

    The two peaks need not be at the same moment: their sum is a bound. What is imported or compiled once had better be
    there before.
    """
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        _, numpy_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes), default=0), numpy_peak
