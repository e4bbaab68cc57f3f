"""Small steps whose timelines are easy to see, for the tests of the reports."""

from undertow.program import Timeline, parse_program, simulate

TWO_LAYERS = """
program two layers
group dp ranks=0-7
input w1 4MiB
input w2 4MiB
input x 8MiB
buffer full1 32MiB
buffer full2 32MiB
buffer h 8MiB
output y 8MiB
gather1 start dp 60us reads w1 writes full1
norm    compute 20us reads x
ready1  wait gather1
layer1  compute 90us reads full1 x writes h
gather2 start dp 60us reads w2 writes full2
ready2  wait gather2
layer2  compute 90us reads full2 h writes y
"""


def run(text: str) -> Timeline:
    return simulate(parse_program(text))


def two_layers() -> Timeline:
    """gather1 from 0 to 60 us, compute held from 20; gather2 from 150 to 210, held all along."""
    return run(TWO_LAYERS)
