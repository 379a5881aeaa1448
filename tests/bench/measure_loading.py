"""A checkpoint on disk, loaded, offloaded and run once, each way in a process of its own, whose host memory is counted.

Ways:

    load_safetensors   the model on the meta device, `fxoffload.load_safetensors`
    cold               the same, after the files were dropped from the kernel's page cache
    from_pretrained    the library's own loading, then packing; it maps the files, and reads them while weights are packed

`peak` is as `rowfile.HostPeak` counts it, from before loading until weights are packed and pinned. What the process held before
that (Python, torch, the device's context) is `before`, and in the peak. `ratio` is the peak over the bytes of the weights,
`ratio_above_start` the same without `before`. Results of the forwards are compared bit for bit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import fxoffload
from fxoffload import timing
from fxoffload.calibrate import machine_of
from fxoffload.devices import available_device
from fxoffload.workloads import Workload, empty_model, find_workload, make_inputs, make_model, show, weight_nbytes
from tests.bench.rowfile import GIB, HostPeak, Row, RowFile, host_nbytes, pinned_nbytes

WAYS = ("load_safetensors", "cold", "from_pretrained")
SHARD_NBYTES = 5 * 10**9
"""As large as the shards of published checkpoints."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default="load_safetensors,from_pretrained", help=f"of {', '.join(WAYS)}")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is written, on a disk; default: the system's temporary one"
    )
    parser.add_argument("--budget", default="4GiB")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_NBYTES)


def run(args: argparse.Namespace, command: str) -> RowFile:
    workload, device = find_workload(args.workload), available_device(torch.device(args.device))
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        start = time.perf_counter()
        nbytes, shards = write_checkpoint(workload, folder, args.shard_bytes)
        head = {"model": show(workload, nbytes, 1), "weight_nbytes": nbytes, "shards": shards, "budget": args.budget}
        rows = RowFile(args.out, command, device, **head, write_s=time.perf_counter() - start)
        rows.write()
        first: Path | None = None
        for way in args.ways.split(","):
            result = folder / f"{way}.pt"
            rows.add(in_child(way, (args.workload, way, str(folder), args.device, args.budget, str(result)), nbytes))
            if result.is_file():
                first = first or result
                rows.rows[-1]["equal"] = torch.equal(torch.load(result), torch.load(first))
                rows.write()
    finally:
        shutil.rmtree(folder)
    return rows


def write_checkpoint(workload: Workload, folder: Path, shard_nbytes: int) -> tuple[int, int]:
    """Write the model in shards with an index and a config, as its library would: bytes of its weights, and how many shards."""
    model: Any = make_model(workload, torch.device("cpu"))
    stem = "model" if workload.module.startswith("transformers.") else "diffusion_pytorch_model"
    shards: list[dict[str, torch.Tensor]] = [{}]
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen:  # tied
            continue
        seen.add(tensor.data_ptr())
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_nbytes:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for k, shard in enumerate(shards, 1):
        file = f"{stem}-{k:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": weight_nbytes(model)}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    if stem == "model":
        model.config.save_pretrained(folder)
    else:
        model.save_config(folder)
    return weight_nbytes(model), len(shards)


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_child(way: str, given: tuple[str, ...], nbytes: int) -> Row:
    """One way in a process that starts from nothing. Its row, or one that says why there is none."""
    if way not in WAYS:
        return {"way": way, "error": f"not one of {', '.join(WAYS)}"}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            row = pool.submit(load, *given).result()
        except Exception as error:
            return {"way": way, "error": f"{type(error).__name__}: {error}"}
    ratios = {"ratio": row["peak_nbytes"] / nbytes, "ratio_above_start": (row["peak_nbytes"] - row["before_nbytes"]) / nbytes}
    return {"way": way, **row, **ratios, "load_gb_s": nbytes / row["load_s"] / 1e9, "peak_gib": row["peak_nbytes"] / GIB}


def load(name: str, way: str, folder: str, device_name: str, budget: str, result: str) -> Row:
    """In the child: load, offload, run; the row's numbers. The result of the forward goes to a file."""
    workload, device = find_workload(name), available_device(torch.device(device_name))
    torch.set_grad_enabled(False)
    # Packages are imported, the device has its context, and the machine is measured before memory is counted.
    torch.zeros(1, device=device)
    machine_of(device)
    make: Callable[[], Any] = (
        from_pretrained(workload, folder) if way == "from_pretrained" else from_meta(workload, folder, device)
    )
    if way == "cold":
        drop_from_page_cache(Path(folder))
    held = host_nbytes()
    before = held.get("anon", 0) + held.get("shmem", 0) + pinned_nbytes()
    with HostPeak() as peak:
        model, load_s = timing.timed(make, device)
        loaded_nbytes = peak.nbytes
        _, offload_s = timing.timed(
            lambda: fxoffload.layerwise_offload(model, onload_device=device, memory_budget=budget), device
        )
    inputs = make_inputs(workload, model, device)
    output, first_call_s = timing.timed(lambda: model(**inputs)[0], device)
    torch.save(output.cpu(), result)
    stats, held = fxoffload.stats(model), host_nbytes()
    return {
        "load_s": load_s,
        "offload_s": offload_s,
        "first_call_s": first_call_s,
        "peak_nbytes": peak.nbytes,
        "peak_while_loading_nbytes": loaded_nbytes,
        "before_nbytes": before,
        "mapped_peak_nbytes": peak.mapped_nbytes,
        "resident_peak_nbytes": peak.resident_nbytes,
        "after_nbytes": held.get("anon", 0) + held.get("shmem", 0) + pinned_nbytes(),
        "pinned_nbytes": stats.nbytes_pinned,
        "streamed_nbytes": stats.nbytes_copied,
        "finite": bool(torch.isfinite(output).all()),
    }


def from_meta(workload: Workload, folder: str, device: torch.device) -> Callable[[], Any]:
    model: Any = empty_model(workload, device)

    def make() -> Any:
        fxoffload.load_safetensors(model, folder, progress=False)
        return model.eval().requires_grad_(False)

    return make


def from_pretrained(workload: Workload, folder: str) -> Callable[[], Any]:
    kind: Any = getattr(importlib.import_module(workload.module), workload.kind)
    dtype = "dtype" if workload.module.startswith("transformers.") else "torch_dtype"
    return lambda: kind.from_pretrained(folder, **{dtype: workload.dtype}).eval().requires_grad_(False)
