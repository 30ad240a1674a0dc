"""Article A4: a general guide to GPU performance in deep learning, which is advice without one
number.

The statements are in our words. So that advice can be judged, each piece of it is read as "helps by
at least so much on this workload": the threshold is ours (`how["at_least"]`, in percent), chosen so
that less would not be worth a line of code, and the verdict shows how much it was. Advice that no
run of this course can test is kept as well, with the reason as its verdict: other hardware, another
machine's administrator, or a cluster.

Four things to know when reading the verdicts:

- A verdict is about one loop. `fp16` on a loop that waits for its host is no argument against
  `fp16`.
- What is judged is the advice alone: each switch changes one knob of the same base (lab 09's
  "base", or "float32"). Two that can't be flipped alone change two knobs; `switches.SWITCHES` says
  which and why.
- Where the article's words hold two statements ("saves memory and raises throughput") they are two
  claims.
- Some runs were made before: labs 02, 03, 04 and 07 have what they measured for other articles
  judged once more.

Runs of lab 09: "base", mixed precision in FP16, "float32", the other switches by name; "numbers:
..." for what precision does to gradients; "files: ...", "decode: ..." and "data: ..." for the way
of an image into training; "threads: ...", "launches ...".
"""

from __future__ import annotations

from labutils.results.claims import Article, Claim, PREDICTED

ARTICLE = Article(
    key="A4",
    author="unnamed",
    publisher="a hosting company's guide",
    language="Japanese",
    subject="Optimising GPU performance in deep learning",
    gpu="any",
)

A_LINE = 5.0
"""Percent that a change of one line should bring."""
MUCH = 20.0
"""Percent that the article's "markedly" and "significantly" are read as."""


def _helps(
    id: str,
    section: str,
    statement: str,
    before: str,
    after: str,
    at_least: float,
    lab: str = "09",
    metric: str = "step_ms",
    towards: str = "less",
    needs: str = "gpu",
    note: str = "",
) -> Claim:
    how = {"before": before, "after": after, "metric": metric, "at_least": at_least, "towards": towards}
    runs = tuple(dict.fromkeys((before, after)))
    return Claim(id, "A4", section, statement, lab, runs, "helps", says="helps", how=how, needs=needs, note=note)


def _beyond(id: str, section: str, statement: str, reason: str) -> Claim:
    """Advice that no run can test, and why."""
    return Claim(id, "A4", section, statement, "09", (), "beyond", says="advised", needs="any", note=reason)


_DIAGNOSIS = (
    Claim(
        id="A4.diagnosis.low-utilisation",
        article="A4",
        section="Finding the bottleneck",
        statement="Low GPU utilisation usually means that the CPU or the I/O is the bottleneck.",
        says="CPU or I/O",
        lab="02",
        runs=("stock",),
        judge="outweighs",
        how={
            "run": "stock",
            "heavier": ("data_share", "host_share", "launch_share"),
            "lighter": ("sync_share", "copies_share"),
        },
        tolerance=0.02,
        note="One loop, A1's, at a third of utilisation: what its GPU waits for, out of the trace.",
    ),
    _helps(
        "A4.diagnosis.nvidia-smi",
        "Finding the bottleneck",
        "The utilisation that nvidia-smi shows tells whether a bottleneck is gone.",
        "stock",
        "workers",
        10,
        lab="04",
        metric="gpu_utilization",
        towards="more",
        note="Judged where the data path's is removed by workers. It says that some kernel ran, not how well.",
    ),
    Claim(
        id="A4.diagnosis.profiler",
        article="A4",
        section="Finding the bottleneck",
        statement="The PyTorch profiler records training steps inside the framework.",
        says="recorded",
        lab="02",
        runs=("stock",),
        judge="occurs",
        how={"run": "stock", "metric": "traced_steps"},
        needs="any",
    ),
    Claim(
        id="A4.diagnosis.topology",
        article="A4",
        section="Finding the bottleneck",
        statement="nvidia-smi topo -m shows how GPUs are connected.",
        says="shown",
        lab="10",
        runs=("topology",),
        judge="occurs",
        how={"run": "topology", "metric": "connections"},
        note="It claims no gain: judged is that it names a connection. Lab 10 measures what the connection carries.",
    ),
    _beyond(
        "A4.diagnosis.nsight",
        "Finding the bottleneck",
        "Nsight Systems and Nsight Compute profile kernels and memory.",
        "They are programs of the CUDA toolkit, which no Python package brings. Lab 02 reads the "
        "same activity records "
        "(CUPTI) through PyTorch's profiler.",
    ),
    _beyond(
        "A4.diagnosis.host-tools",
        "Finding the bottleneck",
        "perf, top and iostat check CPU and disk.",
        "They observe and claim no gain, and perf needs rights that a container hasn't got. Labs "
        "02 and 03 measure "
        "host time and reading time in the training process itself.",
    ),
)

_SYSTEM = (
    _beyond(
        "A4.system.versions",
        "System and driver",
        "Versions of driver, CUDA and cuDNN have to fit each other.",
        "A mismatch can't be made without another driver. `labutils doctor` says which of them "
        "don't fit here; what "
        "one looks like is in article A1's claims on Blackwell.",
    ),
    _beyond(
        "A4.system.persistence",
        "System and driver",
        "Persistence mode and fixed application clocks prevent varying frequencies.",
        "Both need the machine's administrator. All verdicts are by medians with p10-p90 instead, "
        "of runs that were "
        "interleaved.",
    ),
    _beyond(
        "A4.system.container",
        "System and driver",
        "Containers with the NVIDIA toolkit give access to chosen GPUs, with limits of memory and "
        "cores.",
        "A lab can't start the container it runs in. The course's Dockerfile and the README say "
        "how it is started.",
    ),
)

_PYTORCH = (
    _helps(
        "A4.pytorch.cudnn-benchmark",
        "PyTorch",
        "cuDNN's autotuner speeds up models with fixed inputs.",
        "base",
        "cudnn.benchmark",
        A_LINE,
        note="Together with the permission to use TF32, which no convolution of this loop in FP16 makes use of.",
    ),
    _helps(
        "A4.pytorch.mixed-precision",
        "PyTorch",
        "Mixed precision uses tensor cores and raises throughput.",
        "float32",
        "base",
        MUCH,
        note="Against float32 without TF32. PyTorch's default, whose convolutions use TF32, is in the table of lab "
        "09's section 1.",
    ),
    Claim(
        id="A4.pytorch.scaler",
        article="A4",
        section="PyTorch",
        statement="With a GradScaler, FP16 loses fewer gradients to underflow.",
        says="fewer are lost",
        lab="09",
        runs=("numbers: fp16, loss not scaled", "numbers: fp16, scaled loss"),
        judge="more_with",
        how={
            "with": "numbers: fp16, loss not scaled",
            "without": "numbers: fp16, scaled loss",
            "metric": "lost_share",
        },
        needs="any",
        note="The share of gradients that are 0 in FP16 and not in float32.",
    ),
    _helps(
        "A4.pytorch.workers",
        "PyTorch",
        "More DataLoader workers help, as long as neither CPU nor I/O limits: it takes 8.",
        "workers=0",
        "workers=8",
        MUCH,
        lab="03",
    ),
    _helps(
        "A4.pytorch.pinned",
        "PyTorch",
        "Pinned memory and copies that don't block speed up the step.",
        "pageable+blocking",
        "pinned+async",
        2,
        lab="03",
        note="In the stock loop, which waits for the GPU in each micro-step.",
    ),
    Claim(
        id="A4.pytorch.persistent",
        article="A4",
        section="PyTorch",
        statement="Persistent workers shorten the start of an epoch.",
        says="helps",
        lab="03",
        runs=("persistent",),
        judge="helps",
        how={
            "run": "persistent",
            "metrics": ("epoch_start_ms", "epoch_start_persistent_ms"),
            "at_least": MUCH,
            "towards": "less",
        },
        needs="any",
        note="Once an epoch: of an epoch of 305 steps it is a share that no step shows.",
    ),
    _helps(
        "A4.pytorch.prefetch",
        "PyTorch",
        "A prefetch factor of 2 keeps batches ready.",
        "prefetch=1",
        "prefetch=2",
        A_LINE,
        lab="03",
    ),
    _helps(
        "A4.pytorch.accumulation",
        "PyTorch",
        "Gradient accumulation stands in for a larger batch without running out of memory.",
        "base",
        "accumulation",
        MUCH,
        metric="peak_gb",
        note="The same examples a step, one at a time. Its time is in the table of lab 09's section 1.",
    ),
)

_TENSORFLOW_PAGE = "Measured by the optional page notebooks/optional/tensorflow_equivalents.ipynb."
_TENSORFLOW = (
    _helps(
        "A4.tensorflow.mixed-precision",
        "TensorFlow",
        "The policy mixed_float16 speeds up training.",
        "tensorflow: float32",
        "tensorflow: mixed_float16",
        MUCH,
        note=_TENSORFLOW_PAGE,
    ),
    _helps(
        "A4.tensorflow.parallel-map",
        "TensorFlow",
        "tf.data's parallel map and prefetch speed up the input.",
        "tensorflow: plain input",
        "tensorflow: parallel, prefetched",
        MUCH,
        needs="any",
        note=_TENSORFLOW_PAGE,
    ),
    _helps(
        "A4.tensorflow.cache",
        "TensorFlow",
        "Caching small collections in tf.data speeds up the input further.",
        "tensorflow: parallel, prefetched",
        "tensorflow: cached",
        MUCH,
        needs="any",
        note=_TENSORFLOW_PAGE,
    ),
    Claim(
        id="A4.tensorflow.growth",
        article="A4",
        section="TensorFlow",
        statement="Memory growth has TensorFlow take GPU memory as it needs it.",
        says="helps",
        lab="09",
        runs=("tensorflow: memory growth",),
        judge="flag",
        how={"run": "tensorflow: memory growth", "metric": "takes_less"},
        note=_TENSORFLOW_PAGE,
    ),
)

_DATA = (
    _helps(
        "A4.data.storage",
        "Data and I/O",
        "Fast local storage (NVMe) speeds up reading large collections.",
        "files: cold",
        "files: warm",
        A_LINE,
        metric="example_ms",
        needs="any",
        note="Reading and decoding one PNG, from this machine's disk against from memory: the most that any storage "
        "could bring to one reader.",
    ),
    _helps(
        "A4.data.cache",
        "Data and I/O",
        "Caching decoded data in memory saves the decoding.",
        "data: PNG",
        "data: resized in memory",
        MUCH,
        needs="any",
        note="The article says so of small collections (tf.data). Without workers, step against step.",
    ),
    _helps(
        "A4.data.gpu-decoding",
        "Data and I/O",
        "Decoding on the GPU (DALI) relieves the CPU.",
        "decode: JPEG",
        "decode: JPEG, GPU",
        MUCH,
        metric="decode_ms",
        note="By nvJPEG through torchvision, which DALI uses as well. PNG, the article A1's format, no GPU decodes.",
    ),
    _beyond(
        "A4.data.distributed",
        "Data and I/O",
        "Several machines share a distributed file system (Lustre, Ceph) or an object store.",
        "It takes several machines and such a file system.",
    ),
    _beyond(
        "A4.data.cdn",
        "Data and I/O",
        "A content delivery network shortens the download of static data and models.",
        "No lab downloads anything; a download's time is the network's.",
    ),
)

_NETWORK = (
    _helps(
        "A4.network.nccl",
        "Network and distributed training",
        "NCCL lets several GPUs train together.",
        "full one process",
        "full ddp 2",
        50,
        lab="10",
        metric="examples_per_s",
        towards="more",
        note="Two GPUs of one machine, all weights trained; a hundred percent would be perfect.",
    ),
    _helps(
        "A4.network.torchrun",
        "Network and distributed training",
        "torch.distributed.run starts DDP training on several GPUs.",
        "one process",
        "ddp 2",
        50,
        lab="10",
        metric="examples_per_s",
        towards="more",
        note="With LoRA's small gradients. The article's command starts several machines; here it is one.",
    ),
    Claim(
        id="A4.network.debug",
        article="A4",
        section="Network and distributed training",
        statement="NCCL_DEBUG=INFO helps to see what NCCL does.",
        says="useful",
        lab="10",
        runs=("nccl NCCL_DEBUG=INFO",),
        judge="occurs",
        how={"run": "nccl NCCL_DEBUG=INFO", "metric": "channels"},
        note="It claims no gain: what is judged is that it says which channels NCCL has, and how many.",
    ),
    _helps(
        "A4.network.interface",
        "Network and distributed training",
        "NCCL_SOCKET_IFNAME names the network interface to use.",
        "nccl NCCL_DEBUG=INFO",
        "nccl NCCL_SOCKET_IFNAME=lo",
        A_LINE,
        lab="10",
        metric="largest_ms",
        note="An all-reduce of 64 MiB. GPUs of one machine talk over NVLink or PCIe: sockets only introduce them.",
    ),
    _helps(
        "A4.network.no-infiniband",
        "Network and distributed training",
        "In clouds with fast Ethernet, NCCL_IB_DISABLE=1 is useful.",
        "nccl NCCL_DEBUG=INFO",
        "nccl NCCL_IB_DISABLE=1",
        A_LINE,
        lab="10",
        metric="largest_ms",
        note="An all-reduce of 64 MiB, on one machine, where no InfiniBand is in use.",
    ),
    _beyond(
        "A4.network.rdma",
        "Network and distributed training",
        "RDMA over InfiniBand performs better than TCP over Ethernet.",
        "It takes two machines with InfiniBand between them.",
    ),
    Claim(
        id="A4.network.ethernet",
        article="A4",
        section="Network and distributed training",
        statement="Large models want 25, 40 or 100 GbE, or InfiniBand.",
        says="advised",
        lab="10",
        runs=("networks",),
        unit=" %",
        judge="reaches",
        how={"run": "networks", "metric": "small Qwen3, whole at 100 GbE", "at_least": 100 - MUCH},
        note=f"{PREDICTED}: by lab 10's scaling model, the most that the efficiency of two GPUs can be at 100 GbE, the "
        "fastest Ethernet named, where all weights are trained, in the better of two cases. 80 % "
        "would be enough.",
    ),
    Claim(
        id="A4.network.shared-memory",
        article="A4",
        section="Network and distributed training",
        statement="A container needs more shared memory: --shm-size=1g.",
        published=(1,),
        says="--shm-size=1g",
        lab="03",
        runs=("shm=tiny", "shm=enough"),
        judge="cured",
        how={"failing": "shm=tiny", "working": "shm=enough"},
        needs="any",
        note="Judged with DataLoader workers, which share it with NCCL.",
    ),
    _beyond(
        "A4.network.ulimits",
        "Network and distributed training",
        "Containers want unlimited locked memory and a stack of 67108864 bytes.",
        "They are settings of the container, which a lab can't start. Locked memory is what RDMA "
        "registers.",
    ),
)

_MEMORY = (
    _helps(
        "A4.memory.mixed-precision",
        "GPU memory",
        "Mixed precision in FP16 reduces memory.",
        "float32",
        "base",
        MUCH,
        metric="peak_gb",
        note="With LoRA, whose frozen weights are held in 16 bits.",
    ),
    _helps(
        "A4.memory.checkpointing",
        "GPU memory",
        "Activation checkpointing reduces memory.",
        "base",
        "checkpointing",
        MUCH,
        metric="peak_gb",
        note="Its time is in the table of lab 09's section 1.",
    ),
    _helps(
        "A4.memory.fsdp",
        "GPU memory",
        "FSDP shards memory between GPUs.",
        "full ddp 2",
        "full fsdp 2",
        MUCH,
        lab="10",
        metric="peak_allocated_gb",
        note="All weights trained, on two GPUs, against DDP.",
    ),
    _beyond(
        "A4.memory.zero",
        "GPU memory",
        "DeepSpeed's ZeRO shards memory between GPUs.",
        "DeepSpeed is not among the course's libraries. FSDP shards the same three things, and is "
        "judged in lab 10.",
    ),
    _helps(
        "A4.memory.lower-parts",
        "GPU memory",
        "Holding parts of the model in lower precision saves memory.",
        "lora long",
        "lora long, 4 bits",
        MUCH,
        lab="07",
        metric="peak_allocated_gb",
        note="Lab 07's frozen matrices in 4 bits; the article names embeddings.",
    ),
    _helps(
        "A4.memory.sensitive-parts",
        "GPU memory",
        "Sensitive parts should stay in FP32.",
        "numbers: fp16 throughout",
        "numbers: fp16, scaled loss",
        A_LINE,
        metric="gradient_error",
        note="The gradient's error with autocast, which keeps norms, sums and adapters in float32, and with none.",
    ),
)

_ENVIRONMENT = (
    Claim(
        id="A4.environment.visible-devices",
        article="A4",
        section="Environment variables",
        statement="CUDA_VISIBLE_DEVICES controls which GPUs a process gets.",
        says="controls",
        lab="09",
        runs=("visible devices",),
        judge="flag",
        how={"run": "visible devices", "metric": "as_asked"},
        note="as_asked: 1 if a process sees none with an empty list, and one with one.",
    ),
    Claim(
        id="A4.environment.launch-blocking",
        article="A4",
        section="Environment variables",
        statement="CUDA_LAUNCH_BLOCKING=1, meant for debugging, slows training down.",
        published=(1,),
        says="slower",
        lab="09",
        runs=("launches overlap", "launches block"),
        judge="slower",
        how={"before": "launches overlap", "after": "launches block"},
    ),
    _helps(
        "A4.environment.threads",
        "Environment variables",
        "Setting OMP_NUM_THREADS and MKL_NUM_THREADS prevents oversubscription of the CPU.",
        "threads: as they come",
        "threads: one each",
        10,
        metric="images_per_s",
        towards="more",
        needs="any",
        note="As many processes as cores, but 8 at most, which resize images. (DataLoader workers are set to one "
        "thread by PyTorch.)",
    ),
)

_OPERATIONS = (
    _beyond(
        "A4.operations.security",
        "Operations",
        "Keys in place of passwords, closed ports, snapshots before updates, isolation, DDoS "
        "protection.",
        "They keep a server safe and make no step faster.",
    ),
    _beyond(
        "A4.operations.kubernetes",
        "Operations",
        "Kubernetes runs GPU containers by NVIDIA's device plugin or GPU operator.",
        "It takes a cluster.",
    ),
    _beyond(
        "A4.hardware.by-task",
        "Recommended configurations",
        "T4 or RTX 3080 to develop, 2 to 4 A100 or RTX 6000 to train, A10 or A30 to serve, NVLink "
        "to render.",
        "It takes those cards. Labs 00 and 08 predict a step on any card of which the data sheet "
        "is known.",
    ),
    Claim(
        id="A4.method.measure",
        article="A4",
        section="Conclusion",
        statement="Profiling and measuring after each optimisation is the best way: not every one pays.",
        says="measure each",
        lab="09",
        runs=("advice",),
        judge="occurs",
        how={"run": "advice", "metric": "left_alone"},
        needs="any",
        note="left_alone: switches of lab 09 that don't shorten the step by 5 % or more, beyond the spread.",
    ),
)

CLAIMS = _DIAGNOSIS + _SYSTEM + _PYTORCH + _TENSORFLOW + _DATA + _NETWORK + _MEMORY + _ENVIRONMENT + _OPERATIONS
