"""`penstock bench`: measurements as ratios, each beside a peer or a physical limit in the same run."""
