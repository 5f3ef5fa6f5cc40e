"""Variables of running functions are read, and not kept."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from flexinspect_hooks.python_internals.frame_variables import variables_of


class Held:
    """Something that a function drops."""


def test_what_a_function_drops_after_its_variables_were_read_is_gone() -> None:
    held, number = Held(), 3
    gone = weakref.ref(held)

    def read() -> dict[str, Any]:
        return dict(variables_of(sys._getframe(1)))

    found = read()
    assert found["held"] is held
    assert found["number"] == number
    del held, found
    assert gone() is None


def test_a_dict_of_locals_that_the_program_has_stays_as_it_is() -> None:
    number = 3
    mine = locals()
    variables_of(sys._getframe())
    assert mine["number"] == number


def test_the_variables_of_a_module_stay() -> None:
    module: dict[str, Any] = {"sys": sys, "variables_of": variables_of}
    exec("number = 3\nfound = dict(variables_of(sys._getframe()))", module)
    assert module["number"] == module["found"]["number"] == 3
