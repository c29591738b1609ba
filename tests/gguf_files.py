"""GGUF files for tests, written with the package gguf."""

import numpy as np

from hasten.checkpoints.gguf.header import read_gguf


def retyped(path, source, change, *, beside=(), entries=None, without=(), tensors_a_part=0):
    """Write the tensors of the plain file `source` again; change(name, float32 array) gives the type and the bytes of
    one, or None: it stays float32. beside: more tensors by name. entries: other metadata. without: ends of names of
    tensors and metadata that are left out. tensors_a_part: of several files, 0: one."""
    import gguf

    file = read_gguf(source)
    writer = gguf.GGUFWriter(path, file.metadata["general.architecture"], split_max_tensors=tensors_a_part)
    for key, value in (dict(file.metadata) | (entries or {})).items():
        if key != "general.architecture" and not key.endswith(tuple(without)):
            value = value.tolist() if isinstance(value, np.ndarray) else value
            number = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, number)
    for name, tensor in file.tensors.items():
        if name.endswith(tuple(without)):
            continue
        values = file.raw(name).view(tensor.type.dtype).view(tensor.shape).float().numpy()
        kind, stored = change(name, values) or (gguf.GGMLQuantizationType.F32, values)
        writer.add_tensor(name, stored, raw_dtype=kind)
    for name in beside:
        writer.add_tensor(name, beside[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
