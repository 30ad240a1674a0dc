"""Hardware: data sheets, this machine's facts, what it was measured to reach, and the roofline
drawn from that.

    machine(), device(), scale_for(machine())   what this machine is, and which scale of the course fits it
    find_spec("NVIDIA H200")                     the data sheet, dense and sparse peaks apart
    probe(), measured_roofline("bf16")           what this machine reaches
    worth(step_ms, examples, watts, card, Prices())   examples an hour, a night, a kWh and a yen
    cuda                                         torch.cuda's calls, harmless without a GPU

PyTorch is imported only when something is measured.
"""

from labutils.profiling.hardware import cuda
from labutils.profiling.hardware.architectures import runs_on, try_unlisted_architecture
from labutils.profiling.hardware.economy import NIGHT_H, PUBLISHED_YEN, Prices, worth
from labutils.profiling.hardware.host import (
    SEVERAL_GPUS,
    device,
    machine,
    meant_for,
    scale_for,
    usable_cores,
)
from labutils.profiling.hardware.operations import (
    Operation,
    Timing,
    course_operations,
    measure_operation,
    sweep_sizes,
)
from labutils.profiling.hardware.probing import (
    ITEMS,
    Probe,
    measured_roofline,
    probe,
    rate_over_time,
)
from labutils.profiling.hardware.roofline import Roofline
from labutils.profiling.hardware.specs import DTYPES, SPECS, Spec, find_spec, spec_of

__all__ = [
    "DTYPES",
    "ITEMS",
    "NIGHT_H",
    "PUBLISHED_YEN",
    "SEVERAL_GPUS",
    "SPECS",
    "Operation",
    "Prices",
    "Probe",
    "Roofline",
    "Spec",
    "Timing",
    "course_operations",
    "cuda",
    "device",
    "find_spec",
    "machine",
    "meant_for",
    "measure_operation",
    "measured_roofline",
    "probe",
    "rate_over_time",
    "runs_on",
    "scale_for",
    "spec_of",
    "sweep_sizes",
    "try_unlisted_architecture",
    "usable_cores",
    "worth",
]
