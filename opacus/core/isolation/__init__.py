"""Whether a unit's gradient is its own: units run alone, compared with units run together."""
