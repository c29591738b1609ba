"""Models in GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), llama.cpp's format: read and written."""
