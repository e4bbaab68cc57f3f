"""`codegen="inductor"`: our schedule on Inductor's kernels.

The module that runs a graph is ours, so collectives start and are waited for where the Plan says;
what is computed between them is compiled by Inductor, a region at a time. Random numbers are drawn
by ATen, as in eager execution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx

from undertow.codegen.load import Run, load_module
from undertow.codegen.module import write_module
from undertow.codegen.regions import Boxed, in_regions
from undertow.graph.inductor_bridge import compile_region
from undertow.notices import counts, say_once


class InRegions(NamedTuple):
    """A compiled graph: the function that runs it, the text of its module and of its regions."""

    run: Run
    python: str
    regions: str


def compile_inductor(
    gm: fx.GraphModule, label: str, heading: str, notes: Mapping[str, str]
) -> InRegions:
    """The graph with regions of it on kernels of Inductor."""
    sources: list[str] = []

    def compiled(region: fx.GraphModule, inputs: list[Any]) -> Boxed | None:
        try:
            made = compile_region(region, inputs)
        except Exception as error:  # noqa: BLE001  of another compiler, which raises what it likes
            first = str(error).partition("\n")[0]
            say_once("inductor fallback", f"a region of {label} runs as ATen calls: {first}")
            return None
        counts["inductor regions"] += 1
        sources.append(f"# region{len(sources)}\n{getattr(made, 'source_code', '')}")
        run: Boxed = made
        return run

    written = write_module(in_regions(gm, compiled), heading, notes)
    return InRegions(load_module(written, label), written.source, "\n\n".join(sources))
