"""Quantize a GGUF file with llama.cpp: llama_cpp_quantize.py IN.gguf OUT.gguf Q4_K_M [IMATRIX.npz].

Run it with a Python that has llama-cpp-python; hasten is not needed. IMATRIX.npz holds an importance matrix: for a
tensor's name, the mean square of each of its input features over calibration text.
"""

import ctypes
import sys

import llama_cpp
import numpy as np


def main() -> None:
    source, target, kind, *importance = sys.argv[1:]
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    names = {"Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0", "Q4_K_M": "MOSTLY_Q4_K_M", "Q3_K_M": "MOSTLY_Q3_K_M"}
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{names[kind]}")
    if importance:
        found = {name: np.ascontiguousarray(data, dtype=np.float32) for name, data in np.load(importance[0]).items()}
        entry = llama_cpp.llama_model_imatrix_data
        pointer = ctypes.POINTER(ctypes.c_float)
        rows = [entry(name.encode(), data.ctypes.data_as(pointer), data.size) for name, data in found.items()]
        params.imatrix = (entry * (len(rows) + 1))(*rows, entry(None, None, 0))  # ends with a name of none
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        sys.exit(f"llama.cpp does not quantize {source} to {kind}")


if __name__ == "__main__":
    main()
