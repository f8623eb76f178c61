"""Programs of the model's, run where they can do little harm."""
