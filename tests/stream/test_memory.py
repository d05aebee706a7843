import resource
import subprocess
import sys

import pytest

LOOP = """
import resource
from headrace.stream.memory import reuse_freed
if {reuse}:
    assert reuse_freed()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for k in range(3):
    held = [bytearray(2 << 20) for _ in range(4)]
    del held
before = faults()
for k in range(20):
    held = [bytearray(2 << 20) for _ in range(4)]
    del held
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
def test_freed_memory_is_used_again() -> None:
    """The pages of a message are new only once."""
    found = {}
    for reuse in (False, True):
        command = [sys.executable, "-c", LOOP.format(reuse=reuse)]
        found[reuse] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    pages = 20 * 4 * (2 << 20) // resource.getpagesize()
    assert found[True] < pages / 20
    assert found[False] > 10 * max(found[True], 1)
