"""What torch's allocator really gave out."""

import gc
from collections.abc import Callable
from typing import Any, cast

import torch


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that torch's allocator had given out at once during `work`, above those before."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        answer = work()
    waiting = list(cast("Any", profile).profiler.kineto_results.experimental_event_tree())
    events: list[Any] = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:  # pyright: ignore
            events.append(event)
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        held += event.extra_fields.alloc_size
        peak = max(peak, held)
    return peak, answer
