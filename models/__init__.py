"""Build a model, its optimizer, its schedule and its loss, and run one training step."""
