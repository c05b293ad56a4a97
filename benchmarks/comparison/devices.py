"""Where the contestants compute: their tensors, and how the time of a call is taken."""
from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Callable

import numpy as np

Call = Callable[[], None]


class Cpu:
    """NumPy's arrays; times are of the clock."""

    name = "cpu"
    ordinal = -1
    stream = None

    def __init__(self):
        self._dtypes = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}

    def _dtype(self, dtype: str) -> np.dtype:
        if dtype == "bf16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return self._dtypes[dtype]

    def normal(self, shape, dtype: str, seed: int):
        return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(self._dtype(dtype))

    def unwritten(self, shape, dtype: str):
        """NaN, which what is not written keeps."""
        return np.full(shape, np.nan, self._dtype(dtype))

    @staticmethod
    def integers(values: list[int]):
        """int32, as lengths and starts are."""
        return np.array(values, np.int32)

    @staticmethod
    def bytes(count: int):
        """Aligned as a workspace has to be."""
        memory = np.empty(count + 256, np.uint8)
        return memory[-memory.ctypes.data % 256:][:count]

    @staticmethod
    def address(x) -> int:
        return x.ctypes.data

    @staticmethod
    def doubles(x) -> np.ndarray:
        return x.astype(np.float64)

    @staticmethod
    def all_finite(x) -> bool:
        return bool(np.isfinite(x).all())

    def synchronize(self) -> None:
        """Calls return when they are done."""

    def times(self, call: Call, count: int) -> tuple[list[float], float | None]:
        """Milliseconds of `count` calls, and of the host for each where the device works beside it."""
        result = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            result.append((time.perf_counter() - start) * 1e3)
        return result, None

    def describe(self) -> dict:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
        return {"device": model or platform.machine(), "processors": len(os.sched_getaffinity(0))}


class Cuda:
    """PyTorch's tensors on the current GPU, all work on one stream; times are of CUDA events."""

    name = "cuda"

    def __init__(self):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device")
        self._torch = torch
        self._dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        self._stream = torch.cuda.Stream()
        torch.cuda.set_stream(self._stream)
        self.stream = self._stream.cuda_stream
        self.ordinal = torch.cuda.current_device()
        self._events: list = []  # made once: making one takes the host about as long as recording it

    def normal(self, shape, dtype: str, seed: int):
        generator = self._torch.Generator("cuda").manual_seed(seed)
        return self._torch.randn(shape, dtype=self._dtypes[dtype], device="cuda", generator=generator)

    def unwritten(self, shape, dtype: str):
        return self._torch.full(shape, float("nan"), dtype=self._dtypes[dtype], device="cuda")

    def integers(self, values: list[int]):
        return self._torch.tensor(values, dtype=self._torch.int32, device="cuda")

    def bytes(self, count: int):
        return self._torch.empty(count, dtype=self._torch.uint8, device="cuda")

    @staticmethod
    def address(x) -> int:
        return x.data_ptr()

    @staticmethod
    def doubles(x) -> np.ndarray:
        return x.float().cpu().numpy().astype(np.float64)

    @staticmethod
    def all_finite(x) -> bool:
        return bool(x.isfinite().all())

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def times(self, call: Call, count: int) -> tuple[list[float], float | None]:
        while len(self._events) <= count:
            self._events.append(self._torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        events = self._events[:count + 1]
        call()  # while it runs the host gets ahead of the device
        events[0].record()
        start = time.perf_counter()
        for event in events[1:]:
            call()
            event.record()
        host_ms = (time.perf_counter() - start) * 1e3 / count
        self.synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(events, events[1:])], host_ms

    def graph(self, call: Call, count: int) -> Call:
        """`count` calls as one replay of a CUDA graph."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            for _ in range(count):
                call()
        return graph.replay

    def _matmul_tflops(self) -> float:
        """Of a large product by cuBLAS, as a mark to compare runs on different days."""
        size = 8192
        a, b = (self.normal((size, size), "bf16", seed) for seed in (1, 2))
        c = self._torch.empty_like(a)
        times, _ = self.times(lambda: self._torch.mm(a, b, out=c), 30)
        return 2.0 * size**3 / float(np.median(times)) * 1e-9

    def describe(self) -> dict:
        properties = self._torch.cuda.get_device_properties(self.ordinal)
        return {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": self._torch.version.cuda,
            "cudnn": self._torch.backends.cudnn.version(),
            **nvidia_smi(f"GPU-{properties.uuid}"),
            "matmul_tflops": round(self._matmul_tflops(), 1),
        }


def nvidia_smi(gpu: str) -> dict:
    """The driver and what bounds the clocks, as far as nvidia-smi says."""
    fields = {"driver": "driver_version", "power_limit": "power.limit", "max_clock": "clocks.max.sm",
              "clock": "clocks.sm", "temperature": "temperature.gpu"}
    try:
        done = subprocess.run(["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields.values())}",
                               "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(fields, values)) if done.returncode == 0 and len(values) == len(fields) else {}


DEVICES = {"cuda": Cuda, "cpu": Cpu}
