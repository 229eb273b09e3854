"""Processes that work together: what one says reaches all, and all leave in peace."""

import os
import socket
import subprocess
import sys

import pytest

from psidiff.distributed import Processes

LEAVING = """
import os
from psidiff.distributed import Processes

group = Processes.join("cpu")
import torch.distributed.nn.functional  # the group is a default there, if it is there first
assert group.told(lambda: group.rank + 5) == 5
try:
    group.told(lambda: int("five"))
except ValueError as error:
    assert "five" in str(error)
else:
    raise AssertionError


def fail(error):
    raise error


assert group.each(lambda: 10 * group.rank) == [0, 10]
for first, second, wanted in (
    (None, OSError(28, "full"), OSError),
    (ValueError("bad"), KeyboardInterrupt(), KeyboardInterrupt),
):
    error = second if group.rank else first
    try:
        group.each(lambda: error is None or fail(error))
    except wanted:
        continue
    raise AssertionError
group.leave()
names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
assert not any("gloo" in name for name in names), names
"""


GUEST = """
import torch
from psidiff.distributed import Processes

torch.distributed.init_process_group("gloo")
group = Processes.join("cpu")
assert group.told(lambda: group.rank + 5) == 5
group.leave()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted there")
def test_all_hear_the_first_and_leave_no_thread_behind():
    assert run_two(LEAVING) == [0, 0]


def test_a_group_that_the_caller_made_stays():
    assert run_two(GUEST) == [0, 0]


def run_two(code):
    """Two processes that meet: their exit codes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **meeting, "RANK": rank}
        )
        for rank in "01"
    ]
    return [process.wait(timeout=120) for process in both]


def test_a_process_alone_hears_itself():
    assert Processes().told(lambda: 3) == 3
    with pytest.raises(ValueError, match="five"):
        Processes().told(lambda: int("five"))
    assert Processes().each(lambda: 3) == [3]
