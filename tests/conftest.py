"""Fixtures that tests share: a tiny Llama with a tokenizer and a chat template, in memory and as a folder.

torch is imported where it is used: what is set here for its threads is read when it is loaded.
"""

import gc
import os
import warnings

import pytest
from hypothesis import settings

from hasten.errors import HastenWarning

# Rules decide in tests, and never a time: the same test runs the same kernels on every machine. Children inherit it.
os.environ["HASTEN_MEASURE"] = "0"
os.environ["HASTEN_SHARE_CORES"] = "0"  # the last bits of training depend on the number of threads
# As for `hasten train`: threads that wait for each other do not take the cores of the tests beside them.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
settings.register_profile("hasten", deadline=None)  # a busy machine is no error
settings.load_profile("hasten")
# torch.compile asks the compiler for each new cache which of the processor's instructions it knows: 5 s of tests.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if os.environ.get("TRITON_INTERPRET") == "1":  # a child of triton_cases.run_interpreted
    import quick_interpreter  # noqa: F401


def pytest_collection_modifyitems(items):
    """Mark tests of rare instruction sets as slow, and begin with the files whose tests take minutes.

    Then no worker is left alone with one of these files in the end.
    """
    from instruction_sets import RARE

    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value in RARE for value in values):
            item.add_marker("slow")
    minutes = dict.fromkeys((item.path for item in items), 0)
    for item in items:
        for mark in (*item.iter_markers("slow"), *item.iter_markers("real")):
            minutes[item.path] = max(minutes[item.path], mark.kwargs.get("minutes", 0))
    items.sort(key=lambda item: -minutes[item.path])


def pytest_collection_finish():
    """Keep the collector from going through what was imported again and again: a tenth of the time of all tests."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """A shared fixture that warns is an error whichever test asks for it first: that test's filters do not count."""
    if fixturedef.scope == "function":
        return (yield)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HastenWarning)
        return (yield)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder of a tiny random Llama with a byte-level tokenizer and a ChatML-like template."""
    import hasten
    from references import tiny_llama

    folder = tmp_path_factory.mktemp("tiny") / "model"
    hasten.save(tiny_llama(), folder)
    return folder


@pytest.fixture
def tiny(tiny_folder):
    """The tiny model, loaded anew for each test."""
    import hasten

    return hasten.load(tiny_folder, dtype="stored")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small gain nothing from two threads, and on a busy machine wait for the second: ten times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def float32_precision():
    """No test leaves TF32 on for those after it: the bounds of float32 assume products in float32."""
    import torch

    before = torch.get_float32_matmul_precision()
    yield
    if torch.get_float32_matmul_precision() != before:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def processor(monkeypatch):
    """A function that makes this processor one with the given flags, as far as fast dtypes are concerned."""
    from hasten.machine import precision

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    return lambda *flags: monkeypatch.setattr(precision, "_flags", lambda: flags)
