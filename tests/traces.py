"""Hand-written profiler traces, small enough to check with pencil and paper; and a training loop
that is to be traced.

Times in a Chrome trace are microseconds. `TWO_STEPS` is the one that most tests read; its comments
hold the truth.
"""

import torch
from torch.profiler import record_function

MAIN, AUTOGRAD = 1, 2


def slice_(kind, name, start, end, thread=MAIN, **args):
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": kind, "name": name, "pid": 100, "tid": thread, "args": args} | times


def mark(name, start, end):
    return slice_("user_annotation", name, start, end)


def op(name, start, end, thread=MAIN, **args):
    return slice_("cpu_op", name, start, end, thread, **args)


def call(name, start, end, correlation, thread=MAIN):
    return slice_("cuda_runtime", name, start, end, thread, correlation=correlation)


def work(kind, name, start, end, correlation, stream=7):
    return slice_(kind, name, start, end, stream, stream=stream, correlation=correlation)


def kernel(name, start, end, correlation, stream=7):
    return work("kernel", name, start, end, correlation, stream)


def copy(name, start, end, correlation, stream=7):
    return work("gpu_memcpy", name, start, end, correlation, stream)


RUNS_AHEAD = [
    # the host has launched 800 us of work, and waits for the next batch while it runs: 500 us, the
    # last 100 with an idle GPU
    mark("ProfilerStep#5", 0, 1000),
    call("cudaLaunchKernel", 0, 10, 1),
    kernel("nvjet_hsh_128x256_64x4_TNT", 0, 800, 1),
    mark("data", 400, 900),
]

TWO_STEPS = [
    mark("ProfilerStep#5", 0, 1000),
    {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "ts": 0, "args": {"name": "python"}},
    mark("ProfilerStep#6", 1000, 2000),
    # the next batch: 200 us with an idle GPU
    mark("data", 0, 200),
    # a copy from pageable memory and the wait behind it: one synchronisation, 210 to 250
    mark("to_device", 200, 260),
    op("aten::to", 205, 255),
    op("aten::_to_copy", 206, 254),
    op("aten::copy_", 207, 253),
    call("cudaMemcpyAsync", 210, 230, 1),
    call("cudaStreamSynchronize", 230, 250, 0),
    copy("Memcpy HtoD (Pageable -> Device)", 232, 245, 1),
    # two kernels on two streams that overlap for 20 us: together 320 to 450
    mark("forward", 260, 500),
    op("aten::mm", 295, 312, **{"Input Dims": [[4096, 320], [320, 4]]}),
    call("cudaLaunchKernel", 300, 310, 2),
    kernel("sm90_xmma_gemm_f16f16_tn", 320, 420, 2),
    op("aten::mm", 325, 342, **{"Input Dims": [[4096, 320], [320, 320]]}),
    call("cuLaunchKernelEx", 330, 340, 3),
    kernel("nvjet_hsh_128x256_64x4_TNT", 400, 450, 3, stream=20),
    # .item(): 515 to 550, the copy and the wait being one
    mark("log", 500, 600),
    op("aten::item", 510, 560),
    op("aten::_local_scalar_dense", 512, 558),
    call("cudaMemcpyAsync", 515, 520, 4),
    copy("Memcpy DtoH (Device -> Pageable)", 530, 535, 4),
    call("cudaStreamSynchronize", 525, 550, 0),
    # a CUDA graph of three kernels, launched from the autograd thread inside "backward": together
    # 740 to 900
    mark("backward", 650, 950),
    call("cudaGraphLaunch", 700, 720, 5, thread=AUTOGRAD),
    kernel("triton_poi_fused_add_0", 740, 800, 5),
    kernel("void at::native::vectorized_elementwise_kernel<4>", 800, 850, 5),
    kernel("flash_bwd_kernel", 840, 900, 5, stream=20),
    # the second step launches one kernel that ends after the step has: the wall time goes to 2100
    mark("optimizer", 1900, 1998),
    call("cudaLaunchKernel", 1990, 1995, 6),
    kernel("multi_tensor_apply_kernel", 2010, 2100, 6),
    # not of the recorded steps
    call("cudaDeviceSynchronize", 2150, 2300, 0),
]


class Training:
    """A training loop in small, marked as the course's is. On a GPU it has three waits a step: a
    copy from pageable memory, and two reads of the loss. Clipping is none.
    """

    def __init__(self, device):
        self.layer = torch.nn.Linear(1024, 1024, device=device)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=1e-3)
        self.batch = torch.randn(2048, 1024)

    def step(self):
        with record_function("to_device"):
            batch = self.batch.to(self.layer.weight.device)
        with record_function("forward"):
            loss = self.layer(batch).square().mean()
        with record_function("log"):
            self.first = loss.item()
            self.second = loss.item()
        with record_function("backward"):
            loss.backward()
        with record_function("clip"):
            torch.nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
        with record_function("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
