"""`undertow devices`: the devices that costs are known for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from undertow.cli.app import subcommand
from undertow.cli.output import show, show_json
from undertow.cli.pricing import DevicesOption, JsonOption
from undertow.cost.device import Device, find_device, load_devices
from undertow.report.text import table
from undertow.units import format_nbytes, format_ns

app = subcommand()


@app.command("devices")
def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show all of one device.")
    ] = None,
    devices_file: DevicesOption = None,
    json: JsonOption = False,
) -> None:
    """List the devices that undertow knows, or show one with all its figures."""
    devices = load_devices(devices_file)
    if name is not None:
        device = find_device(name, devices)
        if json:
            show_json(to_json(device))
        else:
            show([_details(device)])
    elif json:
        show_json({each.name: to_json(each) for each in devices.values()})
    else:
        show([_overview(list(devices.values()))])


def to_json(device: Device) -> dict[str, Any]:
    return asdict(device)


def _overview(devices: list[Device]) -> Table:
    rows = table("=device", "", ">memory", ">bandwidth", ">bf16", ">fp32", ">launch")
    for device in devices:
        rows.add_row(
            device.name,
            device.title,
            format_nbytes(device.memory_nbytes),
            format_rate(device.memory_bandwidth, "B/s"),
            _peak(device, "bfloat16"),
            _peak(device, "float32"),
            format_ns(round(device.launch_seconds * 1e9)),
        )
    return rows


def _peak(device: Device, dtype: str) -> str:
    return format_rate(device.peak_flops[dtype], "flop/s") if dtype in device.peak_flops else "-"


def _details(device: Device) -> Table:
    rows = table("", "", title=f"{device.name}: {device.title}")
    rows.show_header = False
    rows.add_row("memory", format_nbytes(device.memory_nbytes))
    rows.add_row("memory bandwidth", format_rate(device.memory_bandwidth, "B/s"))
    for dtype, flops in device.peak_flops.items():
        rows.add_row(f"peak {dtype}", format_rate(flops, "flop/s"))
    for op_class, share in device.efficiency.items():
        rows.add_row(f"efficiency {op_class.value}", f"{share:.0%}")
    rows.add_row("units", str(device.units))
    rows.add_row("launch, on the host", format_ns(round(device.launch_seconds * 1e9)))
    rows.add_row("smallest kernel", format_ns(round(device.kernel_seconds * 1e9)))
    rows.add_row("compute slows by, while a collective runs", f"{device.compute_slowdown:.2f}x")
    rows.add_row("collectives slow by, during compute", f"{device.communication_slowdown:.2f}x")
    nvls = ", its switch reduces (NVLink SHARP)" if device.nvls else ""
    rows.add_row("collectives", f"{device.backend} on {device.generation}{nvls}")
    return rows


def format_rate(rate: float, unit: str) -> str:
    """A rate per second with a decimal prefix, as datasheets have it.

    >>> format_rate(3.35e12, "B/s")
    '3.35 TB/s'
    """
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= scale:
            return f"{rate / scale:.4g} {prefix}{unit}"
    return f"{rate:.4g} {unit}"
