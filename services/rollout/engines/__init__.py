"""Generation engines behind the interface of `base.Engine`, found by entry point ``penstock.engines``."""
