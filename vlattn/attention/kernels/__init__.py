"""One file per backend of the additive score."""
