"""From records and clipping factors to the clipped sum."""
