"""One planned run as the kernels' tests make it: outputs poisoned first, and on the CPU machine counted exactly."""
from __future__ import annotations


def run_counted(machine, planned) -> list:
    """The outputs on the host; what the run requested must equal the kernel's cost to the byte."""
    for output in planned.outputs:
        machine.poison(output)
    with machine.counting() as counted:
        planned.run()
    machine.synchronize()
    if counted is not None:
        cost = planned.cost()
        assert (counted.bytes_loaded, counted.bytes_stored) == (cost.bytes_loaded, cost.bytes_stored)
        assert counted.launches == cost.launches
    return [machine.download(output) for output in planned.outputs]
