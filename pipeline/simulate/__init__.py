"""A run in virtual time: the broker's own rules, with actors that only take as long as real ones would."""
