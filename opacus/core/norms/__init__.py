"""From records to squared norms."""
