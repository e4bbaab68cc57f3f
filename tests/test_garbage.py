"""Collections that wait, and memory that is given back."""

import gc
import weakref

from undertow.garbage import give_back, without_collections


class Node:
    """One that may point to itself."""

    def __init__(self) -> None:
        self.other: Node | None = None


def test_collections_wait_for_the_end_of_a_function() -> None:
    assert gc.isenabled()
    assert without_collections(gc.isenabled)() is False
    assert gc.isenabled()


def test_what_was_left_in_circles_is_gone_when_memory_is_given_back() -> None:
    node = Node()
    node.other = node
    alive = weakref.ref(node)
    del node
    give_back()
    assert alive() is None
