"""Looking at the pool: `PoolView` in, pictures and explanations out. Knows no engine."""
