"""Measure the constants of a machine: link, copy and kernel latency, memory bandwidth, matrix and attention rates. Once, in under
a second.

Each is the best of several times, with the device's clocks up and the link measured from several places of the host: a machine
that others use, too, is slower now and then, and what it is slower by is not a constant of it.

Matrix units run at that rate for a tenth of a second. Then they draw more power than the device may, and it lowers its clocks:
an H200 from 800 to 690 TFLOP/s in bfloat16. A forward lasts longer than that, but between its products are kernels that draw
less. So rates of 16 bits and less are those halfway, in time, between the best and the lasting one.

The result is cached in the user's cache directory under a key of device name, driver and torch version. Who finds it there
copies a few blocks: where the link is faster than it was, something else used it then, such as other ranks that began at the
same time, and the machine is measured again. The CPU as a device has nominal constants, so that plans made for it are the same
everywhere.
"""

# `_scaled_mm` is what torch.nn.functional and torchao call, too.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fxoffload.debug import logger
from fxoffload.machine import ATTENTION, MASKED_ATTENTION, Machine

_COPY_NBYTES = 128 << 20
_COPIES = 32
_PLACES = 3
"""Buffers on the host. Memory of one machine may be nearer to the device or further away."""
_WARM_UP_S = 0.05
"""A device that was idle takes so long to raise its clocks."""
_LASTING_S = 0.25
"""Of which the device has lowered its clocks under full load in the second half."""
_KERNELS = 8
_REPEATS = 8
_LOOK_NBYTES = 32 << 20
_FASTER = 1.1
"""Times the bandwidth in the cache: more than copies on a quiet machine differ by."""
_LEAST_LATENCY_MS = 0.001
_MATRIX = 4096
_ATTENTION = (1, 16, 8192, 128)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT8 = torch.float8_e4m3fn


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """The constants of a device: from the cache, or measured now and put there."""
    if device.type == "cpu":
        return Machine.nominal("cpu")
    path = cache_path(device)
    if path.is_file():
        try:
            machine = Machine.load(path)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("calibrate: %s cannot be read (%r); measuring the machine again", path, error)
        else:
            now = link_gb_s(device)
            if now <= _FASTER * machine.link_gb_s:
                return machine
            logger.info("calibrate: the link brings %.1f GB/s now, %s says %.1f; measuring again", now, path, machine.link_gb_s)
    machine = measure(device)
    try:
        machine.save(path)
    except OSError as error:
        logger.warning("calibrate: %s cannot be written (%s); the machine will be measured again next time", path, error)
    return machine


def cache_path(device: torch.device) -> Path:
    """`$XDG_CACHE_HOME/fxoffload/machine-<key>.json`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = hashlib.sha256(f"{name}|{_driver_version()}|{torch.__version__}|8".encode()).hexdigest()[:16]
    return Path(root) / "fxoffload" / f"machine-{key}.json"


def _driver_version() -> str:
    """The driver's own words where it leaves them (NVIDIA on Linux), else the toolkit that torch was built with."""
    driver = Path("/proc/driver/nvidia/version")
    return driver.read_text() if driver.is_file() else str(torch.version.cuda or torch.version.hip)


def measure(device: torch.device) -> Machine:
    """Measure the constants of an accelerator now. Takes three quarters of a second and, at its peak, 512 MiB of the device."""
    torch.accelerator.empty_cache()
    for dtype in _DTYPES:
        # Libraries keep a workspace from their first kernel on. As a piece of a large block it would keep the block, too.
        small = torch.ones(16, 16, device=device, dtype=dtype)
        torch.matmul(small, small)
    _warm_up(device)
    large, pieces, move = _copies_ms(device)
    latency, bytes_ms = fit_pieces(large, pieces, _COPIES)
    launch, _ = fit_pieces(*_products_ms(device), _KERNELS)
    rates = {_name(dtype): _matrix_tflop_s(device, dtype) for dtype in _DTYPES}
    for dtype in _DTYPES:
        if dtype.itemsize == 2:
            rates[_name(dtype) + ATTENTION] = _attention_tflop_s(device, dtype, masked=False)
            rates[_name(dtype) + MASKED_ATTENTION] = _attention_tflop_s(device, dtype, masked=True)
    float8 = _float8_tflop_s(device)
    if float8 is not None:
        rates[_name(_FLOAT8)] = float8
    halfway = (1 + _slowdown(device)) / 2
    rates = {name: rate if name == _name(torch.float32) else rate / halfway for name, rate in rates.items()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    machine = Machine(
        name=name,
        link_gb_s=_COPY_NBYTES / bytes_ms / 1e6,
        copy_latency_ms=latency,
        memory_gb_s=2 * _COPY_NBYTES / move / 1e6,
        launch_ms=launch,
        tflop_s=tuple(rates.items()),
    )
    torch.accelerator.empty_cache()
    logger.info("calibrate: %s", machine)
    return machine


def link_gb_s(device: torch.device) -> float:
    """What the link brings now, in GB/s, by the best of a few copies of 32 MiB from pinned host memory: some milliseconds.

    `measure` also takes off the latency of a copy, and tries several places.
    """
    host = torch.empty(_LOOK_NBYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_LOOK_NBYTES, dtype=torch.uint8, device=device)
    ms = _ms(device, functools.partial(there.copy_, host, non_blocking=True))
    del there
    torch.accelerator.empty_cache()
    return _LOOK_NBYTES / ms / 1e6


def fit_pieces(large_ms: float, pieces_ms: float, count: int) -> tuple[float, float]:
    """What each copy or kernel takes besides its bytes, and what these take, from a large one and `count` pieces of it in a row:

        large = latency + bytes        pieces = count * latency + bytes

    Times may be off: the latency is at least that of a call of the driver, and at most half of the large one.
    """
    latency = (pieces_ms - large_ms) / (count - 1)
    latency = min(max(latency, _LEAST_LATENCY_MS), large_ms / 2)
    return latency, large_ms - latency


def _products_ms(device: torch.device) -> tuple[float, float]:
    """Times of the product of a large matrix with a vector, which reads weights once, and of its pieces one after the other.

    They stand behind a kernel that keeps the device busy until the host has issued all of them.
    """
    matrix = torch.randn(_COPY_NBYTES // 2 // _MATRIX, _MATRIX, device=device).bfloat16()
    square, vector = matrix[:_MATRIX], matrix[0]
    pieces = matrix.chunk(_KERNELS)

    def busy() -> None:
        for _ in range(4):
            torch.matmul(square, square)

    large = _ms(device, lambda: torch.mv(matrix, vector), behind=busy)
    return large, _ms(device, lambda: [torch.mv(piece, vector) for piece in pieces], behind=busy)


def _copies_ms(device: torch.device) -> tuple[float, float, float]:
    """Times of a large copy from pinned host memory, of its pieces one after the other, and of a large one on the device.

    A single copy that finds the device idle takes five times the latency longer, but in a forward they follow each other.
    """
    places = [torch.empty(_COPY_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_PLACES)]
    there, other = (torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def one_by_one(host: torch.Tensor) -> None:
        for to, from_ in zip(there.chunk(_COPIES), host.chunk(_COPIES), strict=True):
            to.copy_(from_, non_blocking=True)

    large = min(_ms(device, functools.partial(there.copy_, host, non_blocking=True)) for host in places)
    pieces = min(_ms(device, functools.partial(one_by_one, host)) for host in places)
    return large, pieces, _ms(device, lambda: other.copy_(there))


def _warm_up(device: torch.device) -> None:
    a = torch.ones(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16)
    end = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end:
        torch.matmul(a, a)
        torch.accelerator.synchronize(device)


def _matrix_tflop_s(device: torch.device, dtype: torch.dtype) -> float:
    return 2 * _MATRIX**3 / _ms(device, _product(device, dtype)) / 1e9


def _slowdown(device: torch.device) -> float:
    """How much longer a product takes when the device has long done nothing else, at least 1."""
    product = _product(device, torch.bfloat16)
    best = _ms(device, product)
    rounds = [_times_ms(device, product)]
    end = time.perf_counter() + _LASTING_S
    while time.perf_counter() < end:
        rounds.append(_times_ms(device, product))
    # The clocks go up and down around what the power allows.
    lasting = statistics.median(itertools.chain(*rounds[len(rounds) // 2 :]))
    return max(lasting / best, 1.0)


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    # Random values: a product of zeros draws less power and runs faster than any real one.
    a, b = (torch.randn(_MATRIX, _MATRIX, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


def _float8_tflop_s(device: torch.device) -> float | None:
    """None where the device or this torch has no such products, or not even the dtype."""
    one = torch.ones((), device=device)
    try:
        a, b = (torch.randn(_MATRIX, _MATRIX, device=device).to(_FLOAT8) for _ in range(2))
        multiply = functools.partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return 2 * _MATRIX**3 / _ms(device, multiply) / 1e9
    except (RuntimeError, TypeError) as error:
        logger.info("calibrate: no float8 products: %s", error)
        return None


def _attention_tflop_s(device: torch.device, dtype: torch.dtype, *, masked: bool) -> float:
    batch, heads, tokens, width = _ATTENTION
    q, k, v = (torch.randn(*_ATTENTION, device=device).to(dtype) for _ in range(3))
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None] if masked else None
    attend = torch.nn.functional.scaled_dot_product_attention
    return 4 * batch * heads * tokens**2 * width / _ms(device, lambda: attend(q, k, v, mask)) / 1e9


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ms(device: torch.device, work: Callable[[], object], behind: Callable[[], object] | None = None) -> float:
    """The least time of some device work, after one warm-up. `behind`: what is issued before it each time, and not counted."""
    work()
    return min(_times_ms(device, work, behind))


def _times_ms(device: torch.device, work: Callable[[], object], behind: Callable[[], object] | None = None) -> list[float]:
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        if behind is not None:
            behind()
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times
