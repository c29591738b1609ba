"""Models in GGUF, llama.cpp's format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): read and written."""
