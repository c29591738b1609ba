"""A checkpoint's tensors on their way to a GPU; on a CPU the same pieces are copied by the same threads."""

import pytest
import torch

import hasten
from hasten.checkpoints import load as loading
from hasten.checkpoints.upload import Upload
from hasten.errors import CheckpointError
from references import make_reference
from triton_cases import needs_gpu

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(), (0, 3), (1000, 77), (4096,), (3, 5, 7)])
def test_whatever_the_size_it_is_a_copy(shape, dtype):
    tensor = torch.randn(shape).mul(50).to(dtype)
    with Upload(CPU, threads=3, piece=1000) as upload:
        for one in (tensor, tensor.mT if tensor.dim() > 1 else tensor):
            made = upload(one)
            assert torch.equal(made, one)
            assert not made.numel() or made.data_ptr() != one.data_ptr()


def test_in_inference_mode():
    with torch.inference_mode(), Upload(CPU, threads=2, piece=1000) as upload:
        tensor = torch.randn(4096)
        assert torch.equal(upload(tensor), tensor)


def uploaded(module, monkeypatch, **options):
    """The model that `hasten.load` makes of a module when all goes through `fill_uploaded`, in small pieces."""

    def fill(*args, dtype, device, share=None):
        loading.fill_uploaded(*args, dtype=dtype, device=CPU)

    monkeypatch.setattr(loading, "fill_pieces", fill)
    monkeypatch.setattr(loading, "Upload", lambda device: Upload(device, threads=2, piece=512))
    return hasten.load(module, **options)


@pytest.mark.parametrize("family", ["gpt2", "llama-mqa", "phi3", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_filled_with_the_same_numbers(family, dtype, monkeypatch):
    module = make_reference(family)
    expected = hasten.load(module, dtype=dtype)
    found = uploaded(module, monkeypatch, dtype=dtype)
    assert found.tied == expected.tied
    for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_stored_tensor_of_several_layers_is_copied_once(monkeypatch):
    """transformers holds gate and up of all experts in one tensor, which the loop over the experts asks for again."""
    copied = []

    def counted(upload, tensor):
        copied.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(Upload, "__call__", counted)
    uploaded(make_reference("mixtral"), monkeypatch)
    assert len(copied) == len(set(copied))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_found_there_too(value, monkeypatch):
    module = make_reference("phi3")
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds 1 values"):
        uploaded(module, monkeypatch)


@pytest.mark.gpu
@needs_gpu
def test_to_a_gpu(tiny_folder):
    with Upload(torch.device("cuda"), threads=4, piece=1 << 20) as upload:
        for size in (100, 1 << 20, (1 << 24) + 3):
            tensor = torch.randint(-128, 128, (size,), dtype=torch.int8)
            for _ in range(3):
                assert torch.equal(upload(tensor).cpu(), tensor)
    on_gpu, at_home = (hasten.load(tiny_folder, device=device, dtype="stored") for device in ("cuda", "cpu"))
    for one, other in zip(on_gpu.parameters(), at_home.parameters(), strict=True):
        assert torch.equal(one.cpu(), other)
