"""Where bytes lie: memory and disk. Immutable extents by address; no prefix logic."""
