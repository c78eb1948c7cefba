"""What every method stands on: reading models, finding their parts, streaming statistics, typed results."""
