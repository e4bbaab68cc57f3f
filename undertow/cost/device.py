"""What one accelerator (or CPU host) can do: peaks, bandwidth, shares reached, fixed overheads.

Devices are data: the shipped ones are in `data/devices.toml`, each figure with its source, and a
user's file adds others or changes some figures of these. Rooflines and collective models read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from undertow.cost.fields import Fields, read_sections
from undertow.errors import CostError, unknown_name
from undertow.program.model import OpClass

SECTIONS = ("devices", "links", "clusters")
"""The sections that a file of devices or clusters may have; one file can hold all of them."""
BACKENDS = ("nccl", "gloo")
GENERATIONS = ("ampere", "ada", "hopper", "blackwell", "cdna3", "cpu")
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Peaks are dense; `efficiency` is the share of the peak that each class reaches.

    Classes bound by arithmetic take their share of `peak_flops`, classes bound by memory theirs of
    `memory_bandwidth`. The contention factors are 1.0 (off) unless somebody measured them.
    """

    name: str
    title: str
    backend: str  # "nccl" or "gloo": which model prices its collectives
    generation: str  # selects the constants of the collective model
    units: int  # multiprocessors, compute units or cores: what a small kernel fails to fill
    peak_flops: Mapping[str, float] = field(hash=False)  # dtype -> flop/s; "tf32" is its own key
    memory_bandwidth: float  # bytes/s
    memory_nbytes: int
    efficiency: Mapping[OpClass, float] = field(hash=False)
    launch_seconds: float  # host time per launch
    kernel_seconds: float  # device time of the smallest kernel
    compute_slowdown: float = 1.0  # factor on compute while a collective runs
    communication_slowdown: float = 1.0  # factor on a collective while compute runs
    nvls: bool = False  # the switch reduces and multicasts (NVLink SHARP)
    links: str = ""  # whose default links it has; empty: its own name's

    def peak(self, dtype: str, *, tf32: bool = False) -> float:
        """Peak flop/s for arithmetic in `dtype`; float32 means tf32 only where `tf32` says so.

        >>> load_devices()["h100"].peak("bfloat16")
        989400000000000.0
        """
        if tf32 and dtype == "float32" and "tf32" in self.peak_flops:
            dtype = "tf32"
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise CostError(
                f"device {self.name!r} has no peak for {dtype!r} (it has {known}); "
                f"add {dtype!r} to its peak_flops in a devices file"
            )
        return self.peak_flops[dtype]

    def share(self, op_class: OpClass) -> float:
        """Share of the peak (flops or bandwidth) that this class of compute reaches."""
        if op_class not in self.efficiency:
            raise CostError(
                f"device {self.name!r} has no efficiency for {op_class.value!r}; "
                f"add it to its efficiency table"
            )
        return self.efficiency[op_class]


def load_devices(path: Path | None = None) -> dict[str, Device]:
    """The shipped devices, and those of the user's file: changed where a name exists, else added.

    A new device gives every key, or says `like = "h100"` and gives those that differ.

    >>> sorted(load_devices())
    ['a100', 'b200', 'cpu', 'h100', 'h200', 'l40s', 'mi300x']
    """
    devices = _read(DATA / "devices.toml", {})
    return devices if path is None else _read(path, devices)


def find_device(name: str, devices: Mapping[str, Device]) -> Device:
    """The device of that name, or an error with the nearest names."""
    if name not in devices:
        raise CostError(unknown_name("device", name, devices))
    return devices[name]


def _read(path: Path, known: Mapping[str, Device]) -> dict[str, Device]:
    devices = dict(known)
    for name, fields in read_sections(path, SECTIONS)["devices"].items():
        base = devices.get(name)
        if fields.has("like"):
            other = fields.text("like")
            if other not in devices:
                raise CostError(f"{fields.where}: {unknown_name('device', other, devices)}")
            base = devices[other]
        devices[name] = _device(name, fields, base)
    return devices


def _device(name: str, fields: Fields, base: Device | None) -> Device:
    """One checked table; what it does not say comes from `base`."""
    backend = fields.text("backend", base.backend if base else None)
    if backend not in BACKENDS:
        raise CostError(f"{fields.where}: {unknown_name('backend', backend, BACKENDS)}")
    generation = fields.text("generation", base.generation if base else None)
    if generation not in GENERATIONS:
        raise CostError(f"{fields.where}: {unknown_name('generation', generation, GENERATIONS)}")
    device = Device(
        name=name,
        title=fields.text("title", base.title if base else None),
        backend=backend,
        generation=generation,
        units=fields.count("units", base.units if base else None),
        peak_flops=_peaks(fields, base),
        memory_bandwidth=fields.positive(
            "memory_bandwidth", base.memory_bandwidth if base else None
        ),
        memory_nbytes=fields.count("memory_nbytes", base.memory_nbytes if base else None),
        efficiency=_efficiency(fields, base),
        launch_seconds=fields.number("launch_seconds", base.launch_seconds if base else None),
        kernel_seconds=fields.number("kernel_seconds", base.kernel_seconds if base else None),
        compute_slowdown=fields.number(
            "compute_slowdown", base.compute_slowdown if base else 1.0, least=1.0
        ),
        communication_slowdown=fields.number(
            "communication_slowdown", base.communication_slowdown if base else 1.0, least=1.0
        ),
        nvls=fields.flag("nvls", base.nvls if base else False),
        links=fields.text("links", (base.links or base.name) if base else name),
    )
    fields.done()
    return device


def _peaks(fields: Fields, base: Device | None) -> dict[str, float]:
    peaks = dict(base.peak_flops) if base else {}
    if base is None or fields.has("peak_flops"):
        table = fields.table("peak_flops")
        peaks |= {dtype: table.positive(dtype) for dtype in table.names()}
    if not peaks:
        raise CostError(f"{fields.where}: 'peak_flops' is empty; give at least one dtype's flop/s")
    return peaks


def _efficiency(fields: Fields, base: Device | None) -> dict[OpClass, float]:
    shares = dict(base.efficiency) if base else {}
    if base is None or fields.has("efficiency"):
        table = fields.table("efficiency")
        for op_class in OpClass:
            shares[op_class] = table.positive(op_class.value, shares.get(op_class), most=1.0)
        table.done()
    return shares
