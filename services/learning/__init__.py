"""What processes that learn share: batches of the ledger's steps, an optimizer, checkpoints, returns."""
