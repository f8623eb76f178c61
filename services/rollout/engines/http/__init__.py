"""Inference servers behind the interface of `base.Engine`, as plug-ins: entry points ``openai`` and ``sglang``."""
