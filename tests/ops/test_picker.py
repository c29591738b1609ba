"""The picker: order, forcing, and a reason for every kernel that was not taken."""

import pytest

from hasten.errors import ConfigError
from hasten.ops.picker import Choice, Kernel, explain, explained, pick, pick_at_call


def kernel(name, *served):
    return Kernel(name, lambda: name, lambda request: None if request in served else f"{name} does not do {request}")


KERNELS = (kernel("fast", "a"), kernel("middle", "a", "b"), kernel("reference", "a", "b", "c"))


@pytest.mark.parametrize(("request_", "name"), [("a", "fast"), ("b", "middle"), ("c", "reference")])
def test_the_first_that_fits_is_taken(request_, name):
    assert pick(KERNELS, request_).name == name
    assert pick(KERNELS, request_).run() == name


def test_forcing_takes_a_later_one():
    assert pick(KERNELS, "a", forced="reference").name == "reference"


def test_forcing_one_that_cannot_serve_says_why():
    with pytest.raises(ConfigError, match=r"'fast' cannot be used here: fast does not do c"):
        pick(KERNELS, "c", forced="fast")


def test_forcing_an_unknown_one_lists_the_known():
    with pytest.raises(ConfigError, match=r"'flash'; known: fast, middle, reference"):
        pick(KERNELS, "a", forced="flash")


def test_explain_gives_a_reason_for_every_other():
    choice = explain(KERNELS, "b")
    assert choice.kernel == "middle"
    assert choice.others == (("fast", "fast does not do b"), ("reference", "middle comes first"))
    choice = explain(KERNELS, "b", forced="reference")
    assert choice.kernel == "reference"
    assert dict(choice.others) == {"fast": "fast does not do b", "middle": "reference was asked for by name"}


def test_every_open_record_gets_the_choices_of_calls_until_it_ends():
    with explained() as outer:
        pick_at_call(KERNELS, "b")
        with explained() as inner:
            pick_at_call(KERNELS, "a", forced="reference")
        pick_at_call(KERNELS, "c")
    pick_at_call(KERNELS, "a")
    assert [choice.kernel for choice in outer] == ["middle", "reference", "reference"]
    assert inner == [
        Choice(
            "reference", (("fast", "reference was asked for by name"), ("middle", "reference was asked for by name"))
        )
    ]


def test_a_list_without_a_reference_is_our_own_mistake():
    with pytest.raises(AssertionError):
        pick(KERNELS[:1], "c")
