"""KV blocks between GPU memories, against plain device copies: `make bench-gpu`.

Each row moves the same bytes in several ways, interleaved, and compares medians of wall time, every
way synchronised with the device:

  copies   a fenced cuda_ipc write into another process's memory, against one device-to-device copy
           of all bytes; how long a batch holds the fence
  cross    the run length at which the copy engines overtake the kernel (`small_run` in
           transfer/gpu/copies.py)
  gather   scattered runs into one dense buffer by the kernel alone, against one copy of as many
           bytes, both by the GPU's clock
  slices   how long a kernel waits while another process computes on the GPU (gpu_serving.py)
  serving  ITL of 16 streams beside 8,000-token prompts, which either worker prefills, both on one
           GPU; the KV copies as a share of a prefill; the ITL beside copies only

Both memories are on the first GPU. With `--peer` the memory of this process is on the second.
`--save` writes benchmarks/results/gpu-CARD.md, such as gpu-h100-80gb-hbm3.md. Without a
GPU it says so and exits with 1. All parts except serving are measured unless `--parts` names
others. `make bench-gpu` measures all.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import command, gpu_serving
from benchmarks.bench_transfer import interleaved
from benchmarks.live import BenchError, end_in_order
from benchmarks.machine import OtherLoad
from benchmarks.report import RESULTS, Row, finish, missing, row, versus
from pullfill.transfer.gpu.copies import BATCH_RUNS, GpuCopier, Interconnect, Lane, lane_of, link_to
from pullfill.transfer.gpu.cuda import load, why_no_cuda
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import Copies, Planner

KIB = 1 << 10
PAGES = (4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
LAYERS = 32
PARTS = ("copies", "cross", "gather", "slices", "serving")
QUICK = PARTS[:-1]
"""The parts that need no engine."""
PAYLOAD_GB_S, KERNEL_TARGET = 1000.0, 0.7
"""Targets for an H200: GB/s of payload, and the share of one plain copy's speed that the kernel
reaches on the GPU, without what the CPU does before.

The memory of an H200 moves 4,800 GB/s. A copy reads and writes every byte, so its payload can reach
2,400 GB/s at most."""
PAYLOAD_BYTES, PAYLOAD_RUN = 1 << 30, 256 * KIB
"""The payload target applies to writes and runs of at least these sizes, in bytes.

The CPU plans each run of a write before the GPU copies it. 1 GiB in runs of 4 KiB is 64 times as
many runs as in 256 KiB, while the copy itself takes 1 ms at the target."""
HELD_MS = 4.0
"""Target for the time that a batch holds the fence: twice its intended duration."""

Ways = dict[str, Callable[[], object]]


def on_the_gpu(device: Device, ways: Ways, rounds: int) -> dict[str, float]:
    """Median seconds of each way by the GPU's clock. A way queues on the device's stream."""
    import torch

    stream = torch.cuda.ExternalStream(device.stream.handle, f"cuda:{device.number}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.cuda.device(device.number), torch.cuda.stream(stream):
        for number in range(rounds + 1):
            for name, way in ways.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                way()
                end.record()
                end.synchronize()
                if number:
                    times[name].append(begin.elapsed_time(end) / 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def speed(nbytes: int, seconds: float) -> float:
    """GB/s."""
    return nbytes / seconds / 1e9


class Device:
    """Ours: copiers with and without the kernel, and plain copies on the same stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.engines = GpuCopier(
            Lane(load(), number, lambda *_: None),
            Interconnect("copy engines", small_run=0, batch_bytes=0),
        )
        self.kernel = GpuCopier(lane_of(number))
        self.has_kernel = lane_of(number).has_kernel
        self.stream = load().stream(number)

    def queue_once(self, source: int, target: int, nbytes: int) -> None:
        """Queue all bytes in one copy."""
        one = np.zeros(1, np.uint64)
        self.stream.copy_batch(
            one + np.uint64(target), one + np.uint64(source), one + np.uint64(nbytes)
        )

    def once(self, source: int, target: int, nbytes: int) -> None:
        """All bytes in one copy."""
        self.queue_once(source, target, nbytes)
        self.stream.synchronize()


def scattered(moved: int, page: int, seed: int) -> Copies:
    """A batch as a session makes it: scattered blocks of LAYERS layers, runs of `page` bytes,
    at most `moved` bytes, within 2 x `moved` bytes."""
    rng = np.random.default_rng(seed)
    count = min(BATCH_RUNS, moved // page) // LAYERS
    layout = dense_layout(LAYERS, 2 * count, 1, page)
    source, target = (rng.permutation(2 * count)[:count].tolist() for _ in range(2))
    (batch,) = Planner(layout, layout).plan(source, target).batches(moved, BATCH_RUNS)
    return batch


def payload_target(moved: int, page: int) -> float | None:
    """Return the target in GB/s for copying `moved` bytes in runs of `page` bytes on an H200."""
    return PAYLOAD_GB_S if moved >= PAYLOAD_BYTES and page >= PAYLOAD_RUN else None


def copy_rows(device: Device, moved: int, rounds: int, directory: Path) -> Iterator[Row]:
    import torch

    from pullfill.transfer.cuda_ipc.ipc_transport import CudaIpcTransport
    from tests.support.gpu_programs import GpuMemory, GpuProgram

    for page in PAGES:
        count = moved // page // LAYERS
        blocks = 2 * count
        layout = dense_layout(LAYERS, blocks, 1, page)
        rng = np.random.default_rng(1)
        source, target = (rng.permutation(blocks)[:count].tolist() for _ in range(2))
        mine = GpuMemory(layout, device.number)
        with GpuProgram("owner", directory, LAYERS, blocks, 1, page) as owner:
            session = CudaIpcTransport([device.number]).connect(mine.memory, owner.descriptor())
            token = owner.open()
            there = session.remote_address  # type: ignore[attr-defined]
            here = mine.memory.address
            ways: Ways = {
                "write": lambda: session.move("write", token, source, target),  # noqa: B023
                "once": lambda: device.once(here, there, moved),  # noqa: B023
            }
            took = interleaved(ways, rounds)
            session.close()
        name = f"cuda_ipc write, {page // KIB} KiB runs scattered"
        write = speed(moved, took["write"])
        once = speed(moved, took["once"])
        yield versus(name, write, "GB/s", "one device copy", once)
        if device.number == 0 and "H200" in torch.cuda.get_device_name():
            yield row(f"{name}: payload", write, "GB/s", at_least=payload_target(moved, page))
        link = link_to(load(), device.number, load().uuid(0))
        batches = -(-moved // min(link.batch_bytes, page * BATCH_RUNS))
        held = 1000 * took["write"] / batches
        yield row(f"{name}: fence held over {link.name}", held, "ms", at_most=HELD_MS)


def cross_rows(device: Device, moved: int, rounds: int, there: int, here: int) -> Iterator[Row]:
    """Engines against kernel by run length, and where they cross."""
    if not device.has_kernel:
        yield missing("kernel against copy engines", "copy engines", "Triton does not work here")
        return
    crossing, faster = 0, True
    for page in (512, KIB, 2 * KIB, *PAGES):
        runs = scattered(moved, page, 2)
        took = interleaved(
            {
                "engines": lambda: device.engines(here, there, runs),  # noqa: B023
                "kernel": lambda: device.kernel(here, there, runs),  # noqa: B023
            },
            rounds,
        )
        faster = faster and took["kernel"] < took["engines"]
        crossing = page if faster else crossing
        kernel, engines = (speed(runs.total, took[way]) for way in ("kernel", "engines"))
        name = f"kernel, {page} byte runs scattered"
        yield versus(name, kernel, "GB/s", "copy engines", engines)
    yield row("longest runs that the kernel moves faster", crossing, "bytes")


def gather_rows(device: Device, moved: int, rounds: int, there: int, here: int) -> Iterator[Row]:
    if not device.has_kernel:
        yield missing("Triton gather", "one device copy", "Triton does not work here")
        return
    import torch

    from pullfill.transfer.gpu import kernel

    rng = np.random.default_rng(3)
    for page in PAGES[:4]:
        count, words = min(BATCH_RUNS, moved // page), page // 8
        source = rng.permutation(2 * moved // page)[:count] * page + here
        table = np.stack((source, np.arange(count) * page + there, np.full(count, words)), axis=1)
        rows = torch.from_numpy(table).to(f"cuda:{device.number}")
        grid = (-(-words // (kernel.LANES * kernel.STEPS)), count)
        run, steps = kernel._copy_runs[grid], {"LANES": kernel.LANES, "STEPS": kernel.STEPS}
        took = on_the_gpu(
            device,
            {
                "gather": lambda: run(rows, **steps),  # noqa: B023
                "once": lambda: device.queue_once(here, there, count * page),  # noqa: B023
            },
            rounds,
        )
        yield versus(
            f"Triton gather, {page // KIB} KiB runs",
            speed(count * page, took["gather"]),
            "GB/s",
            "one device copy",
            speed(count * page, took["once"]),
            at_least=KERNEL_TARGET,
        )


def measure(options: argparse.Namespace) -> list[Row]:
    import torch

    device, moved, rounds = Device(options.peer), options.mib << 20, options.rounds
    rows: list[Row] = []
    if "copies" in options.parts:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
            rows += copy_rows(device, moved, rounds, Path(directory))
    # Within this process: two buffers of the first GPU, ours on the second with --peer.
    there = torch.zeros(2 * moved, dtype=torch.uint8, device="cuda:0")
    here = torch.zeros(2 * moved, dtype=torch.uint8, device=f"cuda:{options.peer}")
    there[:1].copy_(here[:1])  # with --peer, torch lets the second GPU reach the first one's memory
    torch.cuda.synchronize()
    for name, part in (("cross", cross_rows), ("gather", gather_rows)):
        if name in options.parts:
            rows += part(device, moved, rounds, there.data_ptr(), here.data_ptr())
    del there, here
    torch.cuda.empty_cache()
    if "slices" in options.parts:
        rows += gpu_serving.slice_rows(5.0)
    if "serving" in options.parts:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-") as directory:
            try:
                rows += gpu_serving.serving_rows(Path(directory), options.seconds)
            except BenchError as exc:  # keep the rows measured before
                rows.append(Row(metric="serving", value=None, unit=f"failed: {exc}", ok=False))
    return rows


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = command.described(__doc__)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "all"), default=QUICK)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each window with streams")
    parser.add_argument("--mib", type=int, default=1024, help="bytes moved per measurement")
    parser.add_argument("--peer", action="store_const", const=1, default=0, help="use two GPUs")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}/gpu-CARD.md")
    options = parser.parse_args(arguments)
    if "all" in options.parts:
        options.parts = PARTS
    return options


def results_of(card: str, peer: bool = False) -> str:
    """Return the name of the result files of a GPU that CUDA calls `card`, or of two of them."""
    name = re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
    return f"gpu-{name}{'-peer' * peer}"


def main() -> int:
    options = options_of(sys.argv[1:])
    if (why := why_no_cuda()) is not None:
        print(f"no GPU to measure: {why}", file=sys.stderr)
        return 1
    end_in_order()
    quiet = OtherLoad()
    with quiet.window([]):
        rows = measure(options)
    print(quiet)
    import torch

    card = torch.cuda.get_device_name()
    title = f"KV blocks between GPU memories: {card}"
    name = results_of(card, bool(options.peer))
    return finish(name, rows, quiet=quiet.quiet, save=options.save, title=title)


if __name__ == "__main__":
    sys.exit(main())
