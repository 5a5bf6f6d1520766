"""From a model's run to records: what each layer was given, and what came back."""
