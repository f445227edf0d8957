"""Which implementation runs: describe (problem), filter and rank (resolve, ranking), explain."""
