"""The documented ops: one file each, with `naive` beside them as the float64 oracle."""
