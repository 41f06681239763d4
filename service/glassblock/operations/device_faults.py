"""What a device does when it cannot: out of memory, which passes, and a broken context, which does not.

After some faults (an assertion or an illegal address in a kernel, a device that fell off the bus) every later call to
CUDA fails in this process, and in no other. Nothing here can mend that: the process ends, and its supervisor starts
another. Its jobs are taken up again from their leases.
"""

import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from glassblock.errors import NoRoom, ServiceUnavailable
from glassblock.operations.residency import Residency

log = logging.getLogger(__name__)

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h: no mistake of whoever started the process."""

RETRY_SECONDS = 5

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""How torch says on the CPU, as a plain RuntimeError, that there is no memory."""

_ACCELERATOR_FAULTS = ("CUDA error", "HIP error", "device-side assert", "CUBLAS_STATUS_", "CUDNN_STATUS_")


def end_process(fault: BaseException) -> None:
    """Say why, and end this process at once: buffers of a broken device cannot be taken down in order."""
    log.critical("the device cannot be used any more by this process, which ends: %s", _first_line(fault))
    logging.shutdown()
    os._exit(EXIT_STATUS)


@contextmanager
def device_faults(
    device: torch.device, residency: Residency, *, lost: Callable[[BaseException], None] = end_process
) -> Generator[None]:
    """Turn what a device raises into answers.

    Args:
        device: on which the work is done.
        residency: what may be let go where there is no memory.
        lost: called where the device is lost to this process.

    Raises:
        NoRoom: there is no memory; blocks that are not pinned were let go.
        ServiceUnavailable: the device is lost, or failed once.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error):
            residency.clear()
            torch.cuda.empty_cache()
            raise NoRoom(
                "the device has no memory for this", hint="send fewer rows, or later", retry_after=RETRY_SECONDS
            ) from error
        if not _is_of_accelerator(error):
            raise
        if not _answers(device):
            lost(error)
        raise ServiceUnavailable(
            f"the device failed: {_first_line(error)}", hint="send it again", retry_after=RETRY_SECONDS
        ) from error


def _is_of_accelerator(error: BaseException) -> bool:
    return isinstance(error, torch.AcceleratorError) or any(words in str(error) for words in _ACCELERATOR_FAULTS)


def _answers(device: torch.device) -> bool:
    """Whether the device still computes: a fault that persists shows at the next call."""
    try:
        torch.ones(2, device=device).sum().item()
    except RuntimeError:
        return False
    return True


def _first_line(fault: BaseException) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0]
