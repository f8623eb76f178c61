"""What crosses a process boundary in Penstock, and nothing else. Imports no model code."""
