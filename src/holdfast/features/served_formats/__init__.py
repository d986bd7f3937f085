"""Models in the formats of programs that serve them: GGUF files, and compressed-tensors for vLLM, each proved."""
