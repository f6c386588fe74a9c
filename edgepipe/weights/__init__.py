"""Weights in files: GGUF and safetensors, the manifest and card of a model, and what of it a machine holds."""
