"""The embedded engine: transformers' models with continuous batching over a static KV cache."""
