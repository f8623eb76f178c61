"""Commands that examine a machine, an engine or a finished run."""
