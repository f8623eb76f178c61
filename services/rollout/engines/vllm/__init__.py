"""vLLM behind the interface of `base.Engine`. Its engine core and workers are processes of their own."""
