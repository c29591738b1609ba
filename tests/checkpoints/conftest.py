"""Folders of a tiny random Llama."""

import pytest

import hasten
from hasten.quantization import Int4, quantize
from references import make_reference


@pytest.fixture
def int4_folder(tmp_path):
    hasten.save(quantize(hasten.load(make_reference("llama")), Int4(group_size=32, lm_head="none")), tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "model"
    hasten.save(hasten.load(make_reference("llama")), folder)
    return folder


@pytest.fixture(scope="session")
def bfloat16_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "model"
    hasten.save(hasten.load(make_reference("llama"), dtype="bfloat16"), folder)
    return folder
